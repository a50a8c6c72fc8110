"""How much is in flight here, and the word on taking more."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from time import monotonic

from pengserve.cluster.ingress.errors import OverloadedError
from pengserve.planners.admission import IngressLoad, Refusal, admit

RETRY_AFTER_S = 1
RATE_WINDOW = 256  # ends of sequences that the rate is taken over


@dataclass(slots=True)
class Ticket:
    """One HTTP request's place. It counts from admission until its answer is out."""

    num_sequences: int
    admitted: bool = False


class Traffic:
    """Counts sequences in flight at one ingress."""

    def __init__(self, *, max_queued: int, num_ingresses: int, num_slots: Callable[[], int]) -> None:
        """`num_slots` tells how many sequences all ready instances can run at once."""
        self._max_queued, self._num_ingresses, self._num_slots = max_queued, num_ingresses, num_slots
        self._ended_s: deque[tuple[float, int]] = deque(maxlen=RATE_WINDOW)
        self.num_in_flight = 0
        self.is_draining = False

    @contextmanager
    def ticket(self, num_sequences: int) -> Iterator[Ticket]:
        """A place for one request; given back at the end of the block if it was ever taken."""
        ticket = Ticket(num_sequences)
        try:
            yield ticket
        finally:
            if ticket.admitted:
                self.num_in_flight -= num_sequences
                self._ended_s.append((monotonic(), num_sequences))

    def admit(self, ticket: Ticket) -> None:
        """Takes the place of `ticket`.

        Raises:
            OverloadedError: there is none; 429 or, while draining, 503.
        """
        if ticket.admitted:
            return
        self.require_room(ticket.num_sequences)
        ticket.admitted = True
        self.num_in_flight += ticket.num_sequences

    def require_room(self, num_sequences: int) -> None:
        """Takes no place; for a look before a body is read and parsed.

        Raises:
            OverloadedError: there is no room for so many; 429 or, while draining, 503.
        """
        load = IngressLoad(
            num_in_flight=self.num_in_flight,
            num_slots=self._num_slots(),
            num_ingresses=self._num_ingresses,
            max_queued=self._max_queued,
            finished_per_s=self._rate(),
            is_draining=self.is_draining,
        )
        admission = admit(load, num_sequences)
        if admission.refusal is Refusal.DRAINING:
            raise OverloadedError("The server is draining.", HTTPStatus.SERVICE_UNAVAILABLE, admission.retry_after_s)
        if admission.refusal is not None:
            raise OverloadedError(
                "Too many requests are in flight. Try again later.",
                HTTPStatus.TOO_MANY_REQUESTS,
                admission.retry_after_s,
            )

    def _rate(self) -> float:
        """Sequences that ended per second lately; 0 where too few did."""
        if len(self._ended_s) < 2:
            return 0.0
        span_s = monotonic() - self._ended_s[0][0]
        return sum(num for _, num in self._ended_s) / span_s if span_s > 0 else 0.0


class Places:
    """A bounded number of something that requests hold for a while, such as bytes of bodies."""

    def __init__(self, most: int, why: str) -> None:
        """`why` is what a client reads when there are none left."""
        self._most, self._why = most, why
        self.num_taken = 0

    @contextmanager
    def take(self, count: int) -> Iterator[None]:
        """Holds `count` places in the block.

        Raises:
            OverloadedError: there are not so many; 429.
        """
        if self.num_taken + count > self._most:
            raise OverloadedError(self._why, HTTPStatus.TOO_MANY_REQUESTS, RETRY_AFTER_S)
        self.num_taken += count
        try:
            yield
        finally:
            self.num_taken -= count
