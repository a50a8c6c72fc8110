"""A lane's scheduler that is vLLM's own: `vllm.v1.core.sched.scheduler.Scheduler` and its KV cache manager.

In place of a runner's output it is told that every request that was due has got token 0. Requests enter and leave as
`replicas.engine.lane` lets them.
"""

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from pengserve.planners.cost_model import Chunk
from pengserve.planners.types.errors import PlanError
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.engine.lane import blocks_freed, lend, take_back
from pengserve.replicas.engine.microbatches import Microbatches
from pengserve.replicas.engine.vllm_seam import (
    KVCacheBlock,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SamplingParams,
    SchedulerOutput,
)
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.scheduler import Step, check_admitted, check_fits
from pengserve.simulator.engine.vllm_build import build_vllm_scheduler
from pengserve.simulator.requests import Arrival, LiveRequest
from pengserve.simulator.timing.steps import Batch

_SAMPLED, _NOT_SAMPLED = [0], list[int]()  # a request's tokens of one step; vLLM does not change them


class _Handle(NamedTuple):
    output: SchedulerOutput
    sampled: list[list[int]]  # by request, in the order of `output.num_scheduled_tokens`


class VllmScheduler:
    """A `LaneScheduler` whose decisions are those of vLLM's scheduler and KV cache manager."""

    def __init__(self, capacity: KvCapacity, options: SchedulerOptions | None = None, *, is_terse: bool = True) -> None:
        """Builds the scheduler.

        Args:
            is_terse: leaves out what vLLM prepares for a runner and for clients; no decision stands on it.

        Raises:
            ConfigError: vLLM cannot be set so.
        """
        self.capacity = capacity
        self.options = options = options or SchedulerOptions()
        self._scheduler = build_vllm_scheduler(capacity, options, is_terse)
        self._is_terse = is_terse
        self._pool: Any = self._scheduler.kv_cache_manager.block_pool
        self._num_blocks = capacity.num_blocks
        self._withheld: list[int] = []  # blocks that exist and may not be handed out
        self._lives: dict[str, LiveRequest] = {}
        self._params: dict[int, SamplingParams] = {}  # by output tokens
        self._in_flight: deque[SchedulerOutput] = deque()
        self._steps = self._prompted = self._generated = self._preempted = self._resumed = 0
        self._prefix_queries = self._prefix_hits = 0
        self._microbatches = (
            Microbatches(self._scheduler, options.num_stages, options.lookahead)
            if options.lookahead is not None and options.num_stages > 1
            else None
        )
        self._scheduler.is_told_apart = self._microbatches is not None

    # What there is ---------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """KV blocks that the lane has now, without those withheld."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """KV blocks that are free in vLLM's pool now, cached prefixes among them."""
        return int(self._pool.get_num_free_blocks())

    @property
    def running(self) -> Sequence[LiveRequest]:
        """Requests that hold KV, in the order in which they are scheduled."""
        holding = itertools.chain(self._scheduler.running, self._scheduler.kv_holding_waiting)
        return [self._lives[request.request_id] for request in holding]

    @property
    def waiting(self) -> Sequence[LiveRequest]:
        """Requests that hold no KV, the next one first."""
        return [self._lives[request.request_id] for request in self._scheduler.waiting]

    @property
    def queued_tokens(self) -> int:
        """Tokens of all waiting requests."""
        return sum(request.num_tokens for request in self._scheduler.waiting)

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
        found = self._scheduler.requests[request.request_id]
        return int(found.num_computed_tokens - found.num_in_flight_tokens)

    def blocks_freed(self, requests: Sequence[LiveRequest]) -> list[tuple[int, list[int]]]:
        """Per request: how many blocks it alone holds, and the ids that are free once all `requests` are gone."""
        ids = [request.request_id for request in requests]
        return list(blocks_freed(self._scheduler.kv_cache_manager, ids).values())

    # Requests that come and go ---------------------------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Queues a request, before all others if it has generated tokens. Raises PlanError if it is too long."""
        check_fits(request, self.capacity)
        made = self._request(request)
        self._lives[request.request_id] = request
        self._scheduler.add_request(made)
        if request.num_generated:
            self._resumed += 1
            self._scheduler.waiting.remove_request(made)
            self._scheduler.waiting.prepend_request(made)

    def admit(self, request: LiveRequest, computed_tokens: int) -> bool:
        """Takes a request with KV of `computed_tokens`; False, and nothing is changed, where blocks are missing."""
        check_fits(request, self.capacity)
        check_admitted(request, computed_tokens)
        made, manager = self._request(request), self._scheduler.kv_cache_manager
        made.status = RequestStatus.PREEMPTED
        made.num_preemptions = 1
        # One token more than computed, as in production, so that its next step can never wait for a block.
        if manager.allocate_slots(made, computed_tokens + 1, delay_cache_blocks=True, has_scheduled_reqs=False) is None:
            return False
        made.num_computed_tokens = computed_tokens
        self._lives[request.request_id] = request
        self._scheduler.requests[request.request_id] = made
        self._scheduler._enqueue_waiting_request(made)
        if self.options.prefix_caching:
            manager.cache_blocks(made, computed_tokens)
        return True

    def remove(self, requests: Collection[LiveRequest]) -> None:
        """Lets requests go, running or waiting, and frees their blocks; unknown requests are ignored."""
        ids = [request.request_id for request in requests if self._lives.pop(request.request_id, None) is not None]
        self._scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)

    def resize(self, num_blocks: int) -> bool:
        """Sets how many blocks vLLM's pool may hand out; False, and nothing is changed, where more are in use.

        The rest is withheld, as a pipeline's lane withholds blocks without memory.
        """
        more = num_blocks - self._num_blocks
        if -more > self.num_free:
            return False
        if more < 0:
            self._withheld += lend(self._pool, -more)
        else:
            for block_id in range(len(self._pool.blocks), len(self._pool.blocks) + more - len(self._withheld)):
                self._pool.blocks.append(KVCacheBlock(block_id, ref_cnt=1, pool=self._pool))
                self._pool.num_gpu_blocks += 1
                self._withheld.append(block_id)
            offered, self._withheld = self._withheld[:more], self._withheld[more:]
            take_back(self._pool, offered)
        self._num_blocks = num_blocks
        return True

    # Steps -----------------------------------------------------------------------------------------------------------

    def schedule(self, max_steps: int = 1) -> Step | None:
        """vLLM's next step, always a single one; None where there is nothing to compute now."""
        if len(self._in_flight) >= self.options.most_in_flight:
            raise PlanError(f"{len(self._in_flight)} steps are unfinished: finish one first")
        output = self._form()
        preempted = self._count_preempted(output.preempted_req_ids)
        while not output.num_scheduled_tokens:
            # Either those that ran have made room for others than themselves, or nothing ran at all.
            if not output.preempted_req_ids:
                given_up = self._give_up()
                if given_up is None:
                    return None
                preempted += self._count_preempted([given_up])
            output = self._form()
            preempted += self._count_preempted(output.preempted_req_ids)
        self._in_flight.append(output)
        return self._step(output, preempted)

    def _form(self) -> SchedulerOutput:
        if self._microbatches is not None:
            return self._microbatches.schedule(self._in_flight, self.options.most_in_flight)
        return self._scheduler.schedule()

    def _give_up(self) -> str | None:
        """As `GroupLane`: where requests that came with their KV leave no block for any of them, one computes again."""
        holding = self._scheduler.kv_holding_waiting
        if not holding or self._scheduler.running:
            return None
        request = holding.pop_request()
        self._scheduler.kv_cache_manager.free(request)
        request.num_computed_tokens = 0
        self._scheduler.waiting.prepend_request(request)
        return str(request.request_id)

    def _step(self, output: SchedulerOutput, preempted: tuple[LiveRequest, ...]) -> Step:
        requests, lives = self._scheduler.requests, self._lives
        everyone, due, sampled, chunks = [], [], [], []
        num_decodes = context = 0
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request, live = requests[request_id], lives[request_id]
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
            if self.options.prefix_caching and not requests[new.req_id].num_preemptions:
                self._prefix_queries += lives[new.req_id].num_tokens
                self._prefix_hits += new.num_computed_tokens
        return Step(
            batch=Batch(num_decodes, context, tuple(chunks)),
            requests=tuple(everyone),
            due=tuple(due),
            admitted=tuple([lives[new.req_id] for new in output.scheduled_new_reqs]),
            preempted=preempted,
            handle=_Handle(output, sampled),
        )

    def finish(self, step: Step, num_steps: int = 1) -> list[LiveRequest]:
        """Ends the oldest unfinished step, gives vLLM its tokens, and returns the requests that ended."""
        output, sampled = step.handle
        if not self._in_flight or output is not self._in_flight[0]:
            raise PlanError("steps must be finished in the order in which they were scheduled, each once")
        self._in_flight.popleft()
        if self._is_terse:
            self._scheduler.give(output, sampled)
        else:
            ids = list(output.num_scheduled_tokens)
            index = {request_id: number for number, request_id in enumerate(ids)}
            self._scheduler.update_from_output(output, ModelRunnerOutput(ids, index, sampled))
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
