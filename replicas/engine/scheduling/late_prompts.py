"""Orders vLLM's waiting requests so that not all are late where some must be, as `planners/late_prompts.py` says.

Nothing is looked at while no request here has an SLO for its first token. While the one that begins next is in time, no
other is.
"""

import time
from collections.abc import Callable
from typing import Protocol

from pengserve.planners.late_prompts import LateOrder, Waiting
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.vllm_seam import Request, RequestStatus


class FirstTokens(Protocol):
    """Who knows when requests are to have their first tokens: `replicas/contracts.py`."""

    @property
    def num_hurried(self) -> int:
        """Requests here that have an SLO for their first token."""
        ...

    def gone(self, request_id: str) -> float:
        """Share of the time to its first token that is gone; 0 where nothing was promised."""
        ...


class LatePrompts:
    """Belongs to the step thread of a member that schedules."""

    def __init__(
        self, scheduler: SchedulerHandle, known: FirstTokens, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: seconds."""
        self._scheduler, self._known, self._clock = scheduler, known, clock
        self._order = LateOrder()

    def renew(self) -> None:
        """Orders what waits, if it is time to. Call it before a step is scheduled."""
        scheduler, order = self._scheduler, self._order
        if not (self._known.num_hurried or order.is_changed) or not scheduler.waiting:
            return
        now_s = self._clock()
        if not order.is_due(now_s, self._gone(scheduler.next_waiting)):
            return
        requests, by_priority = list(scheduler.waiting), scheduler.goes_by_priority
        places = order.order([self._waiting(request) for request in requests], by_priority=by_priority)
        if by_priority:
            for place in places:
                requests[place.at].arrival_time = place.time_s
        scheduler.order_waiting([requests[place.at] for place in places])
        scheduler.departures.by_lateness += 1
        order.rest(now_s, self._clock() - now_s)

    def _waiting(self, request: Request) -> Waiting:
        return Waiting(
            request_id=request.request_id,
            gone=self._gone(request),
            time_s=request.arrival_time,
            band=request.priority,
            has_begun=has_begun(request),
        )

    def _gone(self, request: Request) -> float:
        return 0.0 if has_begun(request) else self._known.gone(request.request_id)


def has_begun(request: Request) -> bool:
    """Whether a request that waits was preempted, here or elsewhere."""
    return bool(request.status is RequestStatus.PREEMPTED)
