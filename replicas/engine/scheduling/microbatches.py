"""Which requests go into the next microbatch of a pipeline (KunServe 4.3): the planner chooses, vLLM's scheduler acts.

vLLM's scheduler alone puts all running requests into the first microbatch and leaves none for the others: only one
stage of the pipeline would work at a time. So the planner chooses each microbatch's requests and their order.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from pengserve.planners.cost_model import Chunk, CostModel, OnlineFit
from pengserve.planners.lookahead import MicrobatchLimits, Work, chunks_within, next_budget, next_by_tokens
from pengserve.planners.types.config import MicrobatchPolicy
from pengserve.replicas.engine.scheduling.chunk_shares import ChunkShares
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle, is_prefilling
from pengserve.replicas.engine.scheduling.short_prompts import ShortPrompts
from pengserve.replicas.engine.vllm_seam import Request, SchedulerOutput

# What steps cost before any was timed: the demo model's on one core, of which only the relations count.
FIRST_MODEL = CostModel(
    prefix_attention_s=5e-8, self_attention_s=2.6e-8, kv_read_s=5e-7, ffn_s=7.5e-5, other_s=7e-5, load_s=4.5e-3
)

MIN_TOKENS = 32  # no microbatch is made smaller than this, but to give every stage something to do


def ANY(request: Request) -> bool:
    """A microbatch may have every request."""
    return True


class Microbatches:
    """Forms one microbatch after the other out of one scheduler's requests."""

    def __init__(
        self,
        scheduler: SchedulerHandle,
        num_stages: int,
        model: CostModel = FIRST_MODEL,
        policy: MicrobatchPolicy = MicrobatchPolicy.LOOKAHEAD,
        shares: ChunkShares | None = None,
        shorts: ShortPrompts | None = None,
    ) -> None:
        """
        Args:
            shares: which prompts a microbatch reads, where requests of several bands are served.
            shorts: which prompts overtake others, where they are of one.
        """
        self._scheduler, self._num_stages, self._policy = scheduler, num_stages, policy
        max_tokens = scheduler.max_step_tokens
        self._limits = MicrobatchLimits(
            max_tokens=max_tokens, max_requests=scheduler.max_running, min_tokens=min(MIN_TOKENS, max_tokens)
        )
        self._fit, self._shares, self._shorts = OnlineFit(model), shares, shorts
        self._clock = itertools.count(1)
        self._since: dict[str, int] = {}  # request -> when it became ready, in steps of the clock
        self._newest: Sequence[Work] = ()  # of which the newest microbatch was chosen
        # Where short prompts overtook in what is in flight: what it was chosen to cost, by the id of its output.
        self._planned_s: dict[int, float] = {}

    def assume(self, model: CostModel) -> None:
        """Begins to learn anew, from `model`."""
        self._fit = OnlineFit(model)

    def choose(
        self,
        in_flight: Sequence[SchedulerOutput],
        max_in_flight: int,
        may_step: Callable[[Request], bool] = ANY,
    ) -> Mapping[str, int]:
        """The next microbatch, while the others are under way; so many may be at once.

        Returns its requests, in order, each with how many of its tokens are computed: see `schedule_only`.

        Args:
            may_step: whether the microbatch may have a request.
        """
        running = {request.request_id for request in self._scheduler.running}
        candidates = [request for request in self._scheduler.candidates() if may_step(request)]
        ready = [request for request in candidates if request.num_tokens > request.num_computed_tokens]
        limits = self._limits
        if (most := self._scheduler.max_step_tokens) < limits.max_tokens:
            limits = replace(limits, max_tokens=most, min_tokens=min(limits.min_tokens, most))
        if self._shares is not None and self._shares.is_on:
            ready, limits = self._share_out(ready, self._shares, limits)
        return self._budget(ready, running, limits, in_flight, max_in_flight)

    def schedule(
        self,
        in_flight: Sequence[SchedulerOutput],
        max_in_flight: int,
        may_step: Callable[[Request], bool] = ANY,
    ) -> SchedulerOutput:
        """A step of what `choose` chooses."""
        budget, departures = self.choose(in_flight, max_in_flight, may_step), self._scheduler.departures
        num_overtaken = departures.by_length
        with self._overtaking(budget):
            output = self._scheduler.schedule_only(budget)
        self._planned_s = {id(o): self._planned_s[id(o)] for o in in_flight if id(o) in self._planned_s}
        if departures.by_length > num_overtaken:
            self._planned_s[id(output)] = self._fit.model().batch_s(chunks_within(self._newest, budget))
        return output

    def came_back(self, output: SchedulerOutput, chunks: Sequence[Chunk], seconds: float) -> None:
        """Learns from a microbatch that took `seconds` in one stage, and when its requests became ready again."""
        now = next(self._clock)
        for request_id in output.num_scheduled_tokens:
            self._since[request_id] = now
        for request_id in output.finished_req_ids:
            self._since.pop(request_id, None)
        if chunks:
            self._fit.observe(chunks, seconds * self._num_stages)

    def _overtaking(self, budget: Mapping[str, int]) -> contextlib.AbstractContextManager[None]:
        """Around a microbatch of these requests and tokens: in it short prompts overtake what it reads of long ones."""
        shorts, has_bands = self._shorts, self._shares is not None and self._shares.is_on
        if shorts is None or has_bands or not budget or not shorts.is_on:
            return contextlib.nullcontext()
        running = {request.request_id: request for request in self._scheduler.running}
        chosen = [running[request_id] for request_id in budget if request_id in running]
        return shorts.step(chosen, sum(budget.values()))

    def _share_out(
        self, ready: Sequence[Request], shares: ChunkShares, limits: MicrobatchLimits
    ) -> tuple[list[Request], MicrobatchLimits]:
        """What the microbatch may have of `ready`, and its limits."""
        prompts = [request for request in ready if is_prefilling(request)]
        chunks = shares.plan(prompts, len(ready) - len(prompts))
        left = [request for request in ready if request.request_id not in chunks.passed]
        if chunks.max_tokens is None:
            return left, limits
        return left, replace(limits, max_tokens=min(limits.max_tokens, chunks.max_tokens))

    def _budget(
        self,
        ready: Sequence[Request],
        running: Set[str],
        limits: MicrobatchLimits,
        in_flight: Sequence[SchedulerOutput],
        max_in_flight: int,
    ) -> Mapping[str, int]:
        work = [self._work(request, request.request_id in running) for request in ready]
        model = self._fit.model()
        if self._policy is MicrobatchPolicy.TOKENS:
            return next_by_tokens(work, model, limits)
        # Short prompts that overtook cost less than what they took the place of. The next microbatch is made as large
        # as this one was to be: else each in which some overtake would be the measure of smaller ones.
        costs_s = [max(model.batch_s(chunks_of(o)), self._planned_s.get(id(o), 0.0)) for o in in_flight]
        self._newest = work
        return next_budget(work, costs_s, model, limits, max_in_flight=max_in_flight)

    def _work(self, request: Request, is_running: bool) -> Work:
        num_tokens = request.num_tokens - request.num_computed_tokens
        since = self._since.get(request.request_id, 0) if is_running else math.inf
        return Work(
            request_id=request.request_id,
            prefix_tokens=request.num_computed_tokens,
            num_tokens=num_tokens,
            is_prefill=num_tokens > 1,
            since=0 if is_running and num_tokens > 1 else since,  # a prompt that has begun goes on before others begin
        )


def prompt_tokens_of(output: SchedulerOutput) -> int:
    """Tokens of prompts in a step: of each request that computes more than one."""
    return sum(count for count in output.num_scheduled_tokens.values() if count > 1)


def chunks_of(output: SchedulerOutput) -> list[Chunk]:
    """What a step computes, as a cost model prices it."""
    cached = output.scheduled_cached_reqs
    prefixes = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    prefixes |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    return [
        Chunk(prefix_tokens=prefixes[request_id], num_tokens=count)
        for request_id, count in output.num_scheduled_tokens.items()
    ]
