"""A lane's scheduler that is vLLM's own: `vllm.v1.core.sched.scheduler.Scheduler` and its KV cache manager.

In place of a runner's output it is told that every request that was due has got token 0. Requests enter and leave as
`replicas.engine.lanes.lane` lets them.
"""

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from pengserve.planners.cost_model import Chunk
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.engine.scheduling.late_prompts import LatePrompts
from pengserve.replicas.engine.scheduling.long_answers import LongAnswers
from pengserve.replicas.engine.scheduling.microbatches import Microbatches
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.scheduling.short_prompts import ShortPrompts
from pengserve.replicas.engine.scheduling.short_steps import ShortSteps
from pengserve.replicas.engine.vllm_seam import (
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulerOutput,
)
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.scheduler import SimStep, check_admitted, check_fits
from pengserve.simulator.engine.unfinished import UnfinishedSteps
from pengserve.simulator.engine.vllm_build import build_vllm_scheduler
from pengserve.simulator.requests import Arrival, LiveRequest
from pengserve.simulator.timing.steps import Batch

_SAMPLED, _NOT_SAMPLED = [0], list[int]()  # a request's tokens of one step; vLLM does not change them


class _Handle(NamedTuple):
    output: SchedulerOutput
    sampled: list[list[int]]  # by request, in the order of `output.num_scheduled_tokens`


class _Promises:
    """Which SLOs requests have."""

    def __init__(self, lives: Mapping[str, LiveRequest], clock: Callable[[], float]) -> None:
        self._lives, self._clock = lives, clock

    @property
    def num_hurried(self) -> int:
        """Whether a request could have an SLO: any that is here."""
        return len(self._lives)

    def gone(self, request_id: str) -> float:
        """Share of the time to its first token that is gone."""
        return self._lives[request_id].gone(self._clock())

    def is_paced(self, request_id: str) -> bool:
        """Whether it has an SLO for the time between its tokens."""
        return self._lives[request_id].arrival.tbt_s is not None


class VllmScheduler:
    """A `LaneScheduler` whose decisions are those of vLLM's scheduler and KV cache manager."""

    def __init__(
        self,
        capacity: KvCapacity,
        options: SchedulerOptions | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        *,
        is_terse: bool = True,
    ) -> None:
        """Builds the scheduler.

        Args:
            clock: seconds, by which prompts are late.
            is_terse: leaves out what vLLM prepares for a runner and for clients; no decision stands on it.

        Raises:
            ConfigError: vLLM cannot be set so.
        """
        self.capacity = capacity
        self.options = options = options or SchedulerOptions()
        built = build_vllm_scheduler(capacity, options, is_terse)
        self._terse: Any = built if is_terse else None
        self._scheduler = SchedulerHandle(built)
        self._num_blocks = capacity.num_blocks
        self._withheld: list[int] = []  # blocks that exist and may not be handed out
        self._lives: dict[str, LiveRequest] = {}
        self._params: dict[int, SamplingParams] = {}  # by output tokens
        self._unfinished: UnfinishedSteps[_Handle] = UnfinishedSteps(options.most_in_flight)
        self._steps = self._prompted = self._generated = self._preempted = self._resumed = 0
        self._prefix_queries = self._prefix_hits = 0
        self._short_steps = ShortSteps(self._scheduler, begins_short=options.short_first_steps)
        self._shorts = ShortPrompts(self._scheduler, capacity.block_size) if options.short_prompts else None
        known = _Promises(self._lives, clock)
        self._lates = LatePrompts(self._scheduler, known, clock) if options.late_prompts else None
        self._answers = (
            LongAnswers(
                self._scheduler,
                known,
                capacity.block_size,
                self._scheduler.num_free,
                lambda: self._num_blocks,
                rules=options.long_answers,
                clock=clock,
            )
            if options.long_answers is not None
            else None
        )
        self._microbatches = (
            Microbatches(self._scheduler, options.num_stages, options.lookahead, shorts=self._shorts)
            if options.lookahead is not None and options.num_stages > 1
            else None
        )
        if self._terse is not None:
            self._terse.is_told_apart = self._microbatches is not None

    # What there is ---------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """KV blocks that the lane has now, without those withheld."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """KV blocks that are free in vLLM's pool now, cached prefixes among them."""
        return self._scheduler.num_free()

    @property
    def running(self) -> Sequence[LiveRequest]:
        """Requests that hold KV, in the order in which they are scheduled."""
        holding = itertools.chain(self._scheduler.running, self._scheduler.holding)
        return [self._lives[request.request_id] for request in holding]

    @property
    def waiting(self) -> Sequence[LiveRequest]:
        """Requests that hold no KV, the next one first."""
        return [self._lives[request.request_id] for request in self._scheduler.waiting]

    @property
    def queued_tokens(self) -> int:
        """Tokens of all waiting requests."""
        return self._scheduler.queued_tokens()

    @property
    def prefilling_tokens(self) -> int:
        """Tokens of running requests that no step has computed yet, without decodes."""
        return self._scheduler.prefilling_tokens()

    @property
    def totals(self) -> dict[str, int]:
        """Counts that only grow, by their names in `InstanceStats`."""
        return {
            "step": self._steps,
            "total_prompt_tokens": self._prompted,
            "total_generated_tokens": self._generated,
            "total_preemptions": self._preempted,
            "total_prefix_queries": self._prefix_queries,
            "total_prefix_hits": self._prefix_hits,
            "total_resumed": self._resumed,
        }

    def computed_tokens(self, request: LiveRequest) -> int:
        """Tokens of a running request whose KV is there, without those of unfinished steps."""
        found = self._scheduler.request(request.request_id)
        return int(found.num_computed_tokens - found.num_in_flight_tokens)

    def cached_tokens(self, request: LiveRequest) -> int:
        """Tokens of a request that is not here whose KV is in the prefix cache now."""
        return self._scheduler.cached_tokens(self._request(request))

    def blocks_freed(self, requests: Sequence[LiveRequest]) -> list[tuple[int, list[int]]]:
        """Per request: how many blocks it alone holds, and the ids that are free once all `requests` are gone."""
        ids = [request.request_id for request in requests]
        return list(self._scheduler.blocks_freed(ids).values())

    # Requests that come and go ---------------------------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Queues a request, before all others if it has generated tokens. Raises PlanError if it is too long."""
        check_fits(request, self.capacity)
        made = self._request(request)
        self._lives[request.request_id] = request
        self._scheduler.add(made, first=bool(request.num_generated))
        self._resumed += bool(request.num_generated)

    def admit(self, request: LiveRequest, computed_tokens: int) -> bool:
        """Takes a request with KV of `computed_tokens`; False, and nothing is changed, where blocks are missing."""
        check_fits(request, self.capacity)
        check_admitted(request, computed_tokens)
        made = self._request(request)
        made.status = RequestStatus.PREEMPTED
        made.num_preemptions = 1
        if self._scheduler.reserve(made, computed_tokens) is None:
            return False
        self._lives[request.request_id] = request
        self._scheduler.enqueue(made)
        if self.options.prefix_caching:
            self._scheduler.cache(made)
        return True

    def remove(self, requests: Collection[LiveRequest]) -> None:
        """Lets requests go, running or waiting, and frees their blocks; unknown requests are ignored."""
        ids = [request.request_id for request in requests if self._lives.pop(request.request_id, None) is not None]
        self._scheduler.end(ids)

    def resize(self, num_blocks: int) -> bool:
        """Sets how many blocks vLLM's pool may hand out; False, and nothing is changed, where more are in use.

        The rest is withheld, as a pipeline's lane withholds blocks without memory.
        """
        more = num_blocks - self._num_blocks
        if -more > self.num_free:
            return False
        if more < 0:
            self._withheld += self._scheduler.withhold(-more)
        else:
            self._withheld += self._scheduler.extend(max(0, more - len(self._withheld)))
            offered, self._withheld = self._withheld[:more], self._withheld[more:]
            self._scheduler.offer(offered)
        self._num_blocks = num_blocks
        return True

    # Steps -----------------------------------------------------------------------------------------------------------

    def keep_steps_short(self, is_on: bool) -> None:
        """Whether all steps from now on read little of prompts."""
        self._short_steps.keep(is_on)

    def schedule(self, max_steps: int = 1) -> SimStep | None:
        """vLLM's next step, always a single one; None where there is nothing to compute now."""
        self._unfinished.require_room()
        output = self._form()
        preempted = self._count_preempted(output.preempted_req_ids)
        while not output.num_scheduled_tokens:
            # Either those that ran have made room for others than themselves, or nothing ran at all.
            if not output.preempted_req_ids:
                given_up = self._scheduler.give_up_one()
                if given_up is None:
                    return None
                preempted += self._count_preempted([given_up.request_id])
            output = self._form()
            preempted += self._count_preempted(output.preempted_req_ids)
        step = self._step(output, preempted)
        self._unfinished.begin(step.handle)
        return step

    def _form(self) -> SchedulerOutput:
        answers = self._answers.stepping() if self._answers is not None else None
        with answers or contextlib.nullcontext():
            return self._choose()

    def _choose(self) -> SchedulerOutput:
        if self._lates is not None:
            self._lates.renew()
        if self._microbatches is not None:
            in_flight = [handle.output for handle in self._unfinished]
            return self._microbatches.schedule(in_flight, self.options.most_in_flight)
        shorts = self._shorts.step() if self._shorts is not None and self._shorts.is_on else None
        with self._short_steps.limiting() or contextlib.nullcontext(), shorts or contextlib.nullcontext():
            return self._scheduler.schedule()

    def _step(self, output: SchedulerOutput, preempted: tuple[LiveRequest, ...]) -> SimStep:
        find, lives = self._scheduler.request, self._lives
        everyone, due, sampled, chunks = [], [], [], []
        num_decodes = context = 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request, live = find(request_id), lives[request_id]
            computed = request.num_computed_tokens  # with those of this step
            everyone.append(live)
            if num_tokens == 1 and live.num_generated:
                num_decodes += 1
                context += computed
            else:
                chunks.append(Chunk(prefix_tokens=computed - num_tokens, num_tokens=num_tokens))
            if request.is_prefill_chunk:
                sampled.append(_NOT_SAMPLED)
            else:
                due.append(live)
                sampled.append(_SAMPLED)
        for new in output.scheduled_new_reqs:
            if self.options.prefix_caching and not find(new.req_id).num_preemptions:
                self._prefix_queries += lives[new.req_id].num_tokens
                self._prefix_hits += new.num_computed_tokens
                lives[new.req_id].cached_tokens = new.num_computed_tokens
        return SimStep(
            batch=Batch(num_decodes, context, tuple(chunks)),
            requests=tuple(everyone),
            due=tuple(due),
            admitted=tuple([lives[new.req_id] for new in output.scheduled_new_reqs]),
            preempted=preempted,
            handle=_Handle(output, sampled),
        )

    def finish(self, step: SimStep, num_steps: int = 1) -> list[LiveRequest]:
        """Ends the oldest unfinished step, gives vLLM its tokens, and returns the requests that ended."""
        output, sampled = self._unfinished.finish(step.handle)
        if self._terse is not None:
            self._terse.give(output, sampled)
        else:
            ids = list(output.num_scheduled_tokens)
            index = {request_id: number for number, request_id in enumerate(ids)}
            self._scheduler.update(output, ModelRunnerOutput(ids, index, sampled))
        if self._microbatches is not None:
            self._microbatches.came_back(output, (), 0.0)
        self._steps += 1
        ended = []
        for live in step.due:
            if self._lives.get(live.request_id) is not live:
                continue
            if not live.num_generated:
                self._prompted += live.arrival.prompt_tokens
            self._generated += 1
            live.num_generated += 1
            if live.is_done:
                ended.append(live)
                del self._lives[live.request_id]
        return ended

    # vLLM's side of a request ----------------------------------------------------------------------------------------

    def _request(self, live: LiveRequest) -> Request:
        arrival = live.arrival
        params = self._params.get(arrival.output_tokens)
        if params is None:
            params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
            self._params[arrival.output_tokens] = params
        hasher = partial(block_hashes, arrival, self.capacity.block_size) if self.options.prefix_caching else None
        request = Request(
            request_id=arrival.request_id,
            prompt_token_ids=[0] * arrival.prompt_tokens,
            sampling_params=params,
            pooling_params=None,
            arrival_time=arrival.at_s,
            priority=arrival.priority,
            block_hasher=hasher,
        )
        if live.num_generated:
            request.append_output_token_ids([0] * live.num_generated)
            request.status = RequestStatus.PREEMPTED
            request.num_preemptions = 1
        return request

    def _count_preempted(self, request_ids: Collection[str]) -> tuple[LiveRequest, ...]:
        if not request_ids:
            return ()
        lives = [self._lives[request_id] for request_id in request_ids]
        lives.sort(key=lambda live: (live.arrival.at_s, live.request_id))  # vLLM gives a set
        for live in lives:
            live.num_preemptions += 1
        self._preempted += len(lives)
        return tuple(lives)


def block_hashes(arrival: Arrival, block_size: int, request: Request) -> list[bytes]:
    """Hashes of a request's blocks that have become full: of the trace's ids where they reach, else its own.

    An id stands for all content up to its end, so that a block's hash is the id that it ends in, and where.
    """
    first, last = len(request.block_hashes), request.num_tokens // block_size
    if first >= last:
        return []
    ids, width = arrival.prefix_ids, max(1, arrival.prefix_block)
    shared = min(last, min(len(ids) * arrival.prefix_block, arrival.prompt_tokens) // block_size)
    hashes = []
    for end in range((first + 1) * block_size, (shared + 1) * block_size, block_size):
        index = (end - 1) // width
        hashes.append(f"{ids[index]}:{end - index * width}".encode())
    own = range(max(first, shared), last)
    return hashes + [f"{arrival.request_id}/{index}".encode() for index in own]
