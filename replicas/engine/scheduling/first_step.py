"""Keeps the first step short in which vLLM reads a long prompt after an idle time, as `planners/first_step.py` says."""

from contextlib import AbstractContextManager

from pengserve.planners.first_step import first_step_tokens
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle


def first_step(scheduler: SchedulerHandle) -> AbstractContextManager[None] | None:
    """Within it vLLM schedules a step that is kept short; None where the next step need not be.

    It need not where something runs, or where more than one request waits: these wait for the end of the steps.
    """
    if scheduler.running or scheduler.holding or len(scheduler.waiting) != 1:
        return None
    request = scheduler.next_waiting
    most = first_step_tokens(request.num_tokens - request.num_computed_tokens, scheduler.max_step_tokens)
    return scheduler.limited(max_tokens=most) if most is not None else None
