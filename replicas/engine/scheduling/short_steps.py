"""Keeps steps short that a change of shape waits for, over vLLM's scheduler, as `planners/short_steps.py` says."""

from contextlib import AbstractContextManager

from pengserve.planners.short_steps import first_step_tokens, meeting_step_tokens
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle, is_prefilling


class ShortSteps:
    """Belongs to the step thread of a member that schedules."""

    def __init__(self, scheduler: SchedulerHandle, *, begins_short: bool = False) -> None:
        """`begins_short`: the first step after an idle time is kept short, where a prompt is longer than a step."""
        self._scheduler, self._begins_short = scheduler, begins_short
        self._request_id = ""  # whose first step was kept short last
        self._is_meeting = False

    def keep(self, is_on: bool) -> None:
        """Whether all steps from now on are kept short, as other members of a switch wait for their end."""
        self._is_meeting = is_on

    def limiting(self) -> AbstractContextManager[None] | None:
        """Within it vLLM schedules a step that is kept short; None where the next step need not be."""
        scheduler = self._scheduler
        if self._is_meeting:
            if any(map(is_prefilling, scheduler.running)):
                scheduler.decode_first()
            num_decodes = sum(1 + len(request.spec_token_ids) for request in scheduler.running)
            return scheduler.limited(max_tokens=meeting_step_tokens(num_decodes, scheduler.max_step_tokens))
        most = self._first_step_tokens() if self._begins_short else None
        return None if most is None else scheduler.limited(max_tokens=most)

    def _first_step_tokens(self) -> int | None:
        """It need not be short where something runs, or where more than one request waits: these wait for the end of
        the steps. A request is kept short once: vLLM may find that so little of it cannot be read, as with a picture.
        """
        scheduler = self._scheduler
        if scheduler.running or scheduler.holding or len(scheduler.waiting) != 1:
            return None
        request = scheduler.next_waiting
        if request.request_id == self._request_id:
            return None
        most = first_step_tokens(request.num_tokens - request.num_computed_tokens, scheduler.max_step_tokens)
        if most is not None:
            self._request_id = request.request_id
            scheduler.departures.first_steps += 1
        return most
