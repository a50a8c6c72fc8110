"""Keeps the first step short in which vLLM reads a long prompt after an idle time, as `planners/first_step.py` says."""

from contextlib import AbstractContextManager

from pengserve.planners.first_step import first_step_tokens
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle


class FirstStep:
    """Belongs to the step thread of an instance that is alone."""

    def __init__(self, scheduler: SchedulerHandle) -> None:
        self._scheduler = scheduler
        self._request_id = ""  # whose first step was kept short last

    def limiting(self) -> AbstractContextManager[None] | None:
        """Within it vLLM schedules a step that is kept short; None where the next step need not be.

        It need not where something runs, or where more than one request waits: these wait for the end of the steps.
        A request is kept short once: vLLM may find that so little of it cannot be read, as with a picture in it.
        """
        scheduler = self._scheduler
        if scheduler.running or scheduler.holding or len(scheduler.waiting) != 1:
            return None
        request = scheduler.next_waiting
        if request.request_id == self._request_id:
            return None
        most = first_step_tokens(request.num_tokens - request.num_computed_tokens, scheduler.max_step_tokens)
        if most is None:
            return None
        self._request_id = request.request_id
        scheduler.departures.first_steps += 1
        return scheduler.limited(max_tokens=most)
