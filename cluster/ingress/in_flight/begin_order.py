"""In which order requests begin: by their tenants' shares, or as urgent as their clients say and then as they came."""

from pengserve.cluster.ingress.request.record import Links, RequestRecord
from pengserve.cluster.ingress.tenants.fair_queue import FairQueue


class BeginOrder:
    """Belongs to the event loop. The book tells it what becomes of requests."""

    def __init__(self, fair: FairQueue | None, urgent: set[RequestRecord]) -> None:
        """
        Args:
            fair: shares of tenants; None: they have none.
            urgent: is kept as the set of requests above normal priority.
        """
        self.fair, self._urgent = fair, urgent

    def come(self, record: RequestRecord) -> None:
        """A request is in the book."""
        if record.is_urgent:
            self._urgent.add(record)
        if self.fair is not None:
            self.fair.come(record)

    def begun(self, record: RequestRecord) -> None:
        """The first token of a request is there."""
        if self.fair is not None:
            self.fair.begun(record)

    def ended(self, record: RequestRecord) -> None:
        """The book forgets a request."""
        self._urgent.discard(record)
        if self.fair is not None:
            self.fair.ended(record)

    def prioritize(self, record: RequestRecord, priority: int) -> None:
        """A request has another priority from now on, also on its instance."""
        record.priority = priority
        self._urgent.discard(record)
        if record.is_urgent:
            self._urgent.add(record)
        if self.fair is not None:
            self.fair.prioritize(record, priority)
            return
        record.request.priority = priority
        if record.link is not None:
            record.link.reorder([(record.wire_id, priority, record.request.arrival_time)])

    def tend(self, links: Links) -> None:
        """Renews the order of requests that wait on instances."""
        if self.fair is not None:
            ready = links.ready()
            num_slots = sum(link.capacity.max_num_seqs for link in ready)
            is_short = any(link.stats.num_waiting for link in ready)
            self.fair.tend(len(ready), is_short=is_short, num_slots=num_slots)

    def place(self, record: RequestRecord) -> tuple[float, ...]:
        """Among requests without an instance: the more urgent first, then the less suspected."""
        request = record.request
        if self.fair is None:
            return request.priority, record.num_suspected_deaths
        return request.priority, record.num_suspected_deaths, request.arrival_time
