"""Requests that allow only so long a wait for their first token."""

from collections.abc import Callable

from pengserve.cluster.ingress.request.record import RequestRecord


class QueueLimits:
    """Belongs to the event loop. Costs nothing while no request has such a limit."""

    def __init__(self) -> None:
        self._waiting: list[RequestRecord] = []

    def come(self, record: RequestRecord) -> None:
        """A request is in the book."""
        if record.options.contract.queue_limit_s is not None:
            self._waiting.append(record)

    def take_late(self, now_s: float, is_open: Callable[[RequestRecord], bool]) -> list[tuple[RequestRecord, float]]:
        """Those that have waited too long, each with its limit in seconds; they are looked at no more.

        Args:
            is_open: whether the book still has a request.
        """
        late, waiting, self._waiting = [], self._waiting, []
        for record in waiting:
            limit_s = record.options.contract.queue_limit_s
            if record.first_token_s is not None or limit_s is None or not is_open(record):
                continue
            if now_s - record.created_s > limit_s:
                late.append((record, limit_s))
            else:
                self._waiting.append(record)
        return late
