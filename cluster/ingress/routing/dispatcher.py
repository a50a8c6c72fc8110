"""Which instance gets the next request: newest stats, what was sent since and where its prompt is, for the planner."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.routing.prefixes import Prefixes
from pengserve.planners.dispatch import Candidate, DispatchOptions, choose, kv_tokens
from pengserve.planners.ttft import TtftModel
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.link import InstanceLink

# Stats of step s were taken while the instance may already have been in step s + 1: only s + 2 surely saw an add.
STEPS_UNTIL_SEEN = 2
SEEN_AFTER_S = 3.0  # an idle instance makes no steps, but its heartbeats carry stats every second


@dataclass(slots=True)
class _Unseen:
    """Requests sent to one instance that its stats do not show yet, oldest first."""

    # (step known when sent, time, tokens, and those of them that are in the prefix cache there)
    entries: deque[tuple[int, float, int, int]] = field(default_factory=deque)
    num_tokens: int = 0
    num_hits: int = 0

    def prune(self, step: int, now_s: float) -> None:
        while self.entries:
            sent_step, sent_s, tokens, hits = self.entries[0]
            if step < sent_step + STEPS_UNTIL_SEEN and now_s < sent_s + SEEN_AFTER_S:
                return
            self.entries.popleft()
            self.num_tokens -= tokens
            self.num_hits -= hits


QueuedBefore = Callable[[InstanceLink, RequestRecord], int]


class Dispatcher:
    """Picks the link for a request by what the instances are and hold."""

    def __init__(
        self, clock: Callable[[], float], prefixes: Prefixes, queued_before: QueuedBefore | None = None
    ) -> None:
        """`queued_before`: waiting prompt tokens that begin before a request's; None: all of them."""
        self._clock, self._queued_before = clock, queued_before
        self._unseen: dict[InstanceKey, _Unseen] = {}
        self._prefixes = prefixes
        self._ttft = TtftModel()

    def choose(
        self,
        links: Sequence[InstanceLink],
        record: RequestRecord,
        options: DispatchOptions,
        num_priority: Mapping[InstanceKey, int],
    ) -> InstanceLink | None:
        """The link for a request; None where none can ever hold it as wished.

        `num_priority` counts this ingress's urgent requests by instance.
        """
        now_s = self._clock()
        candidates = [
            self._candidate(link, now_s, num_priority.get(link.key, 0)) for link in links if not link.stats.is_follower
        ]
        expected = self._prefixes.expected(record, [candidate.key for candidate in candidates])
        key = choose(candidates, record.num_tokens, options, expected)
        return next((link for link in links if link.key == key), None)

    def max_tokens(self, link: InstanceLink) -> int:
        """Tokens that one request may ever have over `link`, in the shape its instance runs now."""
        stats, capacity = link.stats, link.capacity
        if stats.is_follower:
            return 0
        return min(stats.max_model_len or capacity.max_model_len, kv_tokens(stats, capacity))

    def hit_tokens(self, link: InstanceLink, record: RequestRecord) -> int:
        """Tokens of the request's prompt that are probably in the prefix cache of the link's instance."""
        return self._prefixes.hit_tokens(record, link.key)

    def sent(self, link: InstanceLink, record: RequestRecord, hit_tokens: int) -> None:
        """A request went out over `link`, to where so many tokens of it probably are."""
        num_hits = min(record.num_tokens, hit_tokens)  # they take memory as all others do, and no computing
        record.first_after = (link.stats.shape, self._ahead_tokens(link, record) + record.num_tokens - num_hits)
        unseen = self._unseen.setdefault(link.key, _Unseen())
        unseen.entries.append((link.stats.step, self._clock(), record.num_tokens, num_hits))
        unseen.num_tokens += record.num_tokens
        unseen.num_hits += num_hits
        self._prefixes.sent(record, link.key, kv_tokens(link.stats, link.capacity))

    def first_token(self, record: RequestRecord, wait_s: float) -> None:
        """A request's first token came so long after it was sent."""
        if record.first_after is not None:
            self._ttft.learn(*record.first_after, wait_s)

    def predict_ttft_s(self, link: InstanceLink, record: RequestRecord) -> float | None:
        """Seconds until the first token of a request that goes over `link` now; None where that is not known yet."""
        num_tokens = max(0, record.num_tokens - self._prefixes.hit_tokens(record, link.key))
        return self._ttft.predict(link.stats.shape, self._ahead_tokens(link, record) + num_tokens)

    def _ahead_tokens(self, link: InstanceLink, record: RequestRecord) -> int:
        """Prompt tokens that the instance computes before those of a request that is sent now."""
        if self._queued_before is not None:
            return link.stats.prefilling_tokens + self._queued_before(link, record)
        unseen = self._unseen.get(link.key)
        stats = link.stats
        num_unseen = unseen.num_tokens - unseen.num_hits if unseen is not None else 0
        return stats.queued_tokens + stats.prefilling_tokens + num_unseen

    def ended(self, record: RequestRecord) -> None:
        """A request ended where it is now."""
        link = record.link
        if link is not None:
            self._prefixes.ended(record, link.key, kv_tokens(link.stats, link.capacity))

    def forget(self, key: InstanceKey) -> None:
        """That incarnation is gone."""
        self._unseen.pop(key, None)
        self._prefixes.forget(key)

    def _candidate(self, link: InstanceLink, now_s: float, num_priority: int) -> Candidate:
        unseen = self._unseen.setdefault(link.key, _Unseen())
        unseen.prune(link.stats.step, now_s)
        self._prefixes.follow(link.key, link.stats.shape)
        return Candidate.of(
            link.key,
            link.stats,
            link.capacity,
            num_unseen=len(unseen.entries),
            unseen_tokens=unseen.num_tokens,
            unseen_hit_tokens=unseen.num_hits,
            num_priority=num_priority,
        )
