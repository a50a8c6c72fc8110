"""What became of all requests of a run."""

from collections.abc import Callable, Iterable, Sequence

from pengserve.simulator.engine.gaps import GapCounter
from pengserve.simulator.requests import Arrival, LiveRequest, Outcome


class Outcomes:
    """Takes each request once, when it has ended. Times of outcomes are from `start_s` on."""

    def __init__(self, on_all: Callable[[], None], num_requests: int) -> None:
        """`on_all` is called when all of them have ended."""
        self.start_s = 0.0
        self.gaps = GapCounter()
        self.num_generated = 0  # by all that have ended
        self._on_all, self._num_requests = on_all, num_requests
        self._found: dict[str, Outcome] = {}

    @property
    def num_ended(self) -> int:
        """Requests that have ended, well or not."""
        return len(self._found)

    def end(self, request: LiveRequest, refused: str) -> None:
        """`request` has ended; `refused` says why it was not served, and is empty where it was."""
        arrival = request.arrival
        assert arrival.request_id not in self._found, f"request {arrival.request_id} ends twice"
        self.num_generated += request.num_generated
        self._found[arrival.request_id] = Outcome(
            request_id=arrival.request_id,
            arrived_s=arrival.at_s,
            prompt_tokens=arrival.prompt_tokens,
            output_tokens=request.num_generated,
            scheduled_s=self._since_start(request.scheduled_s, arrival.at_s),
            first_token_s=self._since_start(request.first_token_s),
            end_s=None if refused else self._since_start(request.last_token_s),
            longest_gap_s=request.longest_gap_s,
            num_preemptions=request.num_preemptions,
            num_moves=request.num_moves,
            priority=arrival.priority,
            cached_tokens=request.cached_tokens,
            num_late=request.num_late,
            num_late_paced=request.num_late_paced,
            refused=refused,
        )
        if len(self._found) == self._num_requests:
            self._on_all()

    def give_up(self, requests: Iterable[LiveRequest], why: str) -> None:
        """These have not ended when the run did."""
        for request in requests:
            self.end(request, why)

    def by_arrival(self, arrivals: Sequence[Arrival]) -> tuple[Outcome, ...]:
        """In the order of `arrivals`, as far as they have come."""
        return tuple(self._found[a.request_id] for a in arrivals if a.request_id in self._found)

    def _since_start(self, time_s: float | None, least_s: float = 0.0) -> float | None:
        """`least_s`: what rounding must not bring it below."""
        return None if time_s is None else max(least_s, time_s - self.start_s)
