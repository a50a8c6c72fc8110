"""Lets short prompts overtake the rest of a long one in vLLM's steps, as `planners/short_prompts.py` says.

No request is looked at while none waits and no long prompt is read, nor while what waits has no blocks to begin with.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

from pengserve.planners.short_prompts import IN_ORDER, Overtaking, Prompt, is_any_long, plan_overtaking
from pengserve.planners.types.units import blocks_for
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle, is_prefilling
from pengserve.replicas.engine.vllm_seam import Request


class ShortPrompts:
    """Belongs to the step thread of a member that schedules."""

    def __init__(self, scheduler: SchedulerHandle, block_size: int, num_free: Callable[[], int] | None = None) -> None:
        """`num_free`: blocks that are free, or that the lane can get while it runs; None: the scheduler's free ones."""
        self._scheduler, self._block_size = scheduler, block_size
        self._num_free = scheduler.num_free if num_free is None else num_free
        self._reads_long = False  # a long prompt has begun, or could have in the last step

    @property
    def is_on(self) -> bool:
        """Whether the next step may depart from the order of arrival."""
        scheduler = self._scheduler
        if self._reads_long or scheduler.holding:
            return True
        if not scheduler.waiting or not scheduler.takes_new:
            return False
        return self._blocks_of(scheduler.next_waiting) <= self._num_free()

    @contextlib.contextmanager
    def step(self, running: Sequence[Request] | None = None, budget: int | None = None) -> Iterator[None]:
        """Within it vLLM schedules a step in which short prompts overtake long ones. Only where `is_on`.

        Args:
            running: those of the batch that the step may have, in its order; None: all, in the batch's.
            budget: tokens that it computes at most; None: as many as vLLM takes.
        """
        scheduler = self._scheduler
        running = scheduler.running if running is None else running
        slots, waiting = scheduler.new_slots, scheduler.waiting if scheduler.takes_new else ()
        holding = list(itertools.islice(scheduler.holding, slots))
        new = list(itertools.islice(waiting, slots - len(holding)))
        plan = self._plan([*running, *holding], new, scheduler.max_step_tokens if budget is None else budget)
        with contextlib.ExitStack() as stack:
            if plan.first:
                scheduler.departures.by_length += 1
                by_id = {request.request_id: request for request in new}
                stack.enter_context(scheduler.beginning_first([by_id[request_id] for request_id in plan.first]))
            if plan.max_chunk is not None:
                stack.enter_context(scheduler.chunks_of(plan.max_chunk))
            if plan.passed:
                passed = [request for request in running if request.request_id in plan.passed]
                stack.enter_context(scheduler.passing_over(passed))
            yield

    def _plan(self, begun: Sequence[Request], new: Sequence[Request], budget: int) -> Overtaking:
        step_tokens = self._scheduler.max_step_tokens
        reading = [request for request in begun if is_prefilling(request)]
        self._reads_long = is_any_long(map(_unread, reading), map(_unread, new), step_tokens)
        if not self._reads_long:
            return IN_ORDER
        prompts = [self._prompt(request, is_running=True) for request in reading]
        prompts += [self._prompt(request, is_running=False) for request in new]
        # A request that decodes computes one token, and those that were guessed.
        num_decoding = len(begun) - len(reading) + sum([len(r.spec_token_ids) for r in begun if r.spec_token_ids])
        num_free = self._num_free() - self._scheduler.watermark_blocks
        return plan_overtaking(prompts, num_decoding, budget, num_free, step_tokens)

    def _prompt(self, request: Request, *, is_running: bool) -> Prompt:
        return Prompt(
            request_id=request.request_id,
            num_tokens=_unread(request),
            num_blocks=self._blocks_of(request) - blocks_for(request.num_computed_tokens, self._block_size),
            is_running=is_running,
            band=request.priority if self._scheduler.goes_by_priority else 0,
        )

    def _blocks_of(self, request: Request) -> int:
        return blocks_for(request.num_tokens, self._block_size)


def _unread(request: Request) -> int:
    return int(request.num_tokens - request.num_computed_tokens)
