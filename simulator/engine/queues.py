"""What the fast scheduler knows of one request, and the queues in which requests wait."""

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator

from pengserve.simulator.requests import LiveRequest


class Entry:
    """One request at one scheduler."""

    __slots__ = (
        "blocks",
        "computed",
        "has_begun",
        "host_blocks",
        "in_flight",
        "is_decoding",
        "left",
        "live",
        "order",
        "preemptions",
        "room",
        "stale",
        "tokens",
    )

    def __init__(self, live: LiveRequest) -> None:
        arrival = live.arrival
        self.live = live
        self.order = (arrival.priority, arrival.at_s, arrival.request_id)  # as vLLM orders by priority
        self.tokens = live.num_tokens
        self.left = arrival.output_tokens - live.num_generated  # tokens until its end
        self.computed = 0  # tokens whose KV is there, or will be after the unfinished steps
        self.in_flight = 0  # tokens in unfinished steps
        self.stale = 0  # ... that were scheduled before it was preempted: it waits until they have come back
        self.blocks = 0
        self.room = 0  # tokens that its blocks hold
        self.preemptions = int(live.num_generated > 0)  # as vLLM counts: to come from elsewhere is one
        self.host_blocks = 0  # that were swapped out
        self.has_begun = False  # it was preempted, or came from elsewhere
        self.is_decoding = False  # computes one token a step from now on


class WaitingQueue:
    """First come, first served, or by priority; and the tokens of all that wait."""

    def __init__(self, by_priority: bool) -> None:
        self._by_priority = by_priority
        self._entries: deque[Entry] = deque()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def head(self) -> Entry:
        """The next one."""
        return self._entries[0]

    def append(self, entry: Entry) -> None:
        """Puts one at the end, or where its priority is."""
        self.num_tokens += entry.tokens
        if self._by_priority:
            insort(self._entries, entry, key=_order)
        else:
            self._entries.append(entry)

    def prepend(self, entry: Entry) -> None:
        """Puts one that has begun before all others, or where its priority is."""
        entry.has_begun = True
        if self._by_priority:
            self.append(entry)
        else:
            self.num_tokens += entry.tokens
            self._entries.appendleft(entry)

    def pop(self) -> Entry:
        """Takes the next one out."""
        entry = self._entries.popleft()
        self.num_tokens -= entry.tokens
        return entry

    def take(self, entry: Entry) -> None:
        """Takes this one out, wherever it is."""
        self._entries.remove(entry)
        self.num_tokens -= entry.tokens

    def order(self, entries: Collection[Entry]) -> None:
        """All that wait are in this order from now on."""
        self._entries = deque(entries)

    def remove(self, entries: Collection[Entry]) -> None:
        """Takes some out, wherever they are."""
        self._entries = deque(entry for entry in self._entries if entry not in entries)
        self.num_tokens = sum(entry.tokens for entry in self._entries)


def _order(entry: Entry) -> tuple[int, float, str]:
    return entry.order
