"""In which order prompts begin where some can no longer have their first tokens in time.

First come, first served, a queue that is longer than the time that requests allow makes all of them late: each is
served after its time, though as many as are served could have been in time. So once the first one that waits is very
late (`LATE` times the time that it allows has gone)

    1. prompts that can be in time begin before those that most likely cannot: more than `IN_TIME` of the time to their
       first token is gone
    2. once in `TURN` the order of arrival holds, so that late ones have their share of what is read: none starves
    3. a request without an SLO for its first token is never late. It keeps its place among those that can be in time
    4. none goes before one of a more urgent band

Until then nothing is changed: where only some come a little late, a new order would make these later still.
"""

from collections.abc import Sequence
from math import inf, nextafter
from typing import NamedTuple

IN_TIME, LATE = 0.7, 3.0
TURN = 4
PERIOD_S = 0.02  # between two orders
COST = 0.05  # share of the time that ordering may take: long queues are ordered less often


class Waiting(NamedTuple):
    """A request that waits to begin, or to begin anew."""

    request_id: str
    gone: float  # share of the time to its first token that is gone; 0: nothing was promised, or it has begun before
    time_s: float  # of its arrival, or what the last order gave it instead
    band: int = 0
    has_begun: bool = False  # it was preempted, or came from elsewhere: it stands before those that have not


class Place(NamedTuple):
    """Who begins next."""

    at: int  # in what was given
    time_s: float  # the time of arrival that a queue by priority is to have it by


class LateOrder:
    """Of the requests that wait at one scheduler. Deterministic."""

    def __init__(self) -> None:
        self._next_s = 0.0  # when the next order is due
        self._is_changed = False  # the order is another than that of arrival
        self._times: dict[str, tuple[float, float]] = {}  # when a request came, and the time that it was given instead
        self._num_orders = 0

    @property
    def is_changed(self) -> bool:
        """Whether requests wait in another order than that of their arrival."""
        return self._is_changed

    def is_due(self, now_s: float, first_gone: float) -> bool:
        """Whether to order what waits now.

        Args:
            first_gone: of the first one that waits, see `Waiting.gone`.
        """
        return now_s >= self._next_s and (self._is_changed or first_gone >= LATE)

    def order(self, waiting: Sequence[Waiting], *, by_priority: bool) -> list[Place]:
        """The order in which they begin.

        Args:
            waiting: as the queue has them.
            by_priority: whether the queue goes by band and time; else by its own order.
        """
        came_s = [self._came_s(request) for request in waiting]
        places = list(range(len(waiting)))
        if by_priority:
            places.sort(key=lambda at: (waiting[at].band, came_s[at], waiting[at].request_id))
        else:
            places.sort(key=lambda at: (not waiting[at].has_begun, 0.0 if waiting[at].has_begun else came_s[at]))
        # The times stay the same, and who has which of them changes: requests that come now stand behind all of these.
        times_s = [came_s[at] for at in places]
        if by_priority:
            times_s = _apart([(waiting[at].band, came_s[at]) for at in places])
        self._num_orders += 1
        self._is_changed = any(request.gone >= LATE for request in waiting)
        if self._is_changed and self._num_orders % TURN:
            places.sort(key=lambda at: (waiting[at].band if by_priority else 0, waiting[at].gone > IN_TIME))
        self._times = {waiting[at].request_id: (came_s[at], time_s) for at, time_s in zip(places, times_s, strict=True)}
        return [Place(at, time_s) for at, time_s in zip(places, times_s, strict=True)]

    def rest(self, now_s: float, took_s: float = 0.0) -> None:
        """An order was made, and took so long: the next one is due later."""
        self._next_s = now_s + max(PERIOD_S, took_s / COST)

    def _came_s(self, request: Waiting) -> float:
        """When it came; it may have got another time from elsewhere meanwhile."""
        came_s, given_s = self._times.get(request.request_id, (request.time_s, request.time_s))
        return came_s if given_s == request.time_s else request.time_s


def _apart(places: Sequence[tuple[int, float]]) -> list[float]:
    """Of places by band and time the times, with none twice in a band: equal ones would be ordered by their ids.

    One that has begun keeps the time that it was given, which another one may have got back when it is preempted.
    """
    found, last = list[float](), dict[int, float]()
    for band, time_s in places:
        last[band] = max(time_s, nextafter(last.get(band, -inf), inf))
        found.append(last[band])
    return found
