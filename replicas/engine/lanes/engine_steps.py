"""Steps of a vLLM engine, one result a call, also where vLLM schedules a step before the one before has ended.

    call       schedules      its result is that of
    step()     1, then 2      1                        with asynchronous scheduling, which has two under way
    step()     3              2
    end_step() nothing        3                        no step is under way: shapes, memory and KV may change
    whole()    4              4                        as without asynchronous scheduling

Without asynchronous scheduling each `step` schedules a step and has its result.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs

Clock = Callable[[], float]


class StepResult(NamedTuple):
    """What a step made."""

    outputs: Mapping[int, EngineCoreOutputs]  # by client index
    seconds: float  # from its begin, or from the end of the step before if it was scheduled by then
    num_read: int | None  # tokens of prompts that it was given; None: not counted


NOTHING = StepResult({}, 0.0, None)


class EngineSteps:
    """Belongs to the thread that steps."""

    def __init__(self, core: Any, clock: Clock = time.perf_counter) -> None:
        """`core` is vLLM's `EngineCore`."""
        self._core, self._step, self._clock = core, core.step_fn, clock
        self._since_s = clock()  # when what is under way began, or the newest step ended
        self._read: deque[int | None] = deque()  # of the steps under way, the oldest first

    @property
    def under_way(self) -> bool:
        """Whether a step was scheduled whose result has not been taken."""
        return bool(self._core.batch_queue)

    def whole(
        self, choosing: Callable[[], AbstractContextManager[object]], unread: Callable[[], int | None]
    ) -> StepResult:
        """The result of a step that no other overlaps; of the oldest that is under way, where there is one."""
        return self.end_step() or self._advance(choosing, unread) or self.end_step() or NOTHING

    def end_step(self) -> StepResult | None:
        """The result of the oldest step that is under way, without scheduling another; None where there is none."""
        if not self.under_way:
            return None
        scheduler = self._core.scheduler
        scheduler.has_requests = lambda: False  # then vLLM waits for what is under way, and schedules nothing
        try:
            outputs, is_executed = self._step()
        finally:
            del scheduler.has_requests
        self._core.post_step(is_executed)
        return self._ended(outputs)

    def step(
        self, choosing: Callable[[], AbstractContextManager[object]], unread: Callable[[], int | None]
    ) -> StepResult:
        """The result of the oldest step. `choosing` is entered around each step that is scheduled.

        Args:
            unread: tokens of prompts that no step was given; None where they are not to be counted.
        """
        while (result := self._advance(choosing, unread)) is None:
            pass
        return result

    def _advance(
        self, choosing: Callable[[], AbstractContextManager[object]], unread: Callable[[], int | None]
    ) -> StepResult | None:
        """Schedules a step; None where the result of none is due, as vLLM wants one more under way."""
        if not self.under_way:
            self._since_s = self._clock()
        # Of steps that do not overlap, each has its result before the next one is scheduled, also where it was empty.
        is_scheduled = self._core.batch_queue is None or self._core.scheduler.has_requests()
        before = unread()
        with choosing():
            outputs, is_executed = self._step()
        self._core.post_step(is_executed)
        if is_scheduled:
            after = unread()
            self._read.append(None if before is None or after is None else before - after)
        if outputs is None and self.under_way:
            return None
        return self._ended(outputs)

    def _ended(self, outputs: Mapping[int, EngineCoreOutputs] | None) -> StepResult:
        now_s = self._clock()
        seconds, self._since_s = now_s - self._since_s, now_s
        return StepResult(outputs or {}, seconds, self._read.popleft() if self._read else None)
