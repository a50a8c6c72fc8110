"""Which instance gets the next request: newest stats plus what was sent since, handed to the planner."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from pengserve.planners.dispatch import Candidate, DispatchOptions, choose, kv_tokens
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.link import InstanceLink

# Stats of step s were taken while the instance may already have been in step s + 1: only s + 2 surely saw an add.
STEPS_UNTIL_SEEN = 2
SEEN_AFTER_S = 3.0  # an idle instance makes no steps, but its heartbeats carry stats every second


@dataclass(slots=True)
class _Unseen:
    """Requests sent to one instance that its stats do not show yet, oldest first."""

    entries: deque[tuple[int, float, int]] = field(default_factory=deque)  # (step known when sent, time, tokens)
    num_tokens: int = 0

    def prune(self, step: int, now_s: float) -> None:
        while self.entries:
            sent_step, sent_s, tokens = self.entries[0]
            if step < sent_step + STEPS_UNTIL_SEEN and now_s < sent_s + SEEN_AFTER_S:
                return
            self.entries.popleft()
            self.num_tokens -= tokens


class Dispatcher:
    """Picks the link for a request by what the instances are and hold."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._unseen: dict[InstanceKey, _Unseen] = {}

    def choose(
        self,
        links: Sequence[InstanceLink],
        num_tokens: int,
        options: DispatchOptions,
        num_priority: Mapping[InstanceKey, int],
    ) -> InstanceLink | None:
        """The link for a request that holds `num_tokens` already; None where none can ever hold it as wished.

        `num_priority` counts this ingress's urgent requests by instance.
        """
        now_s = self._clock()
        candidates = [
            self._candidate(link, now_s, num_priority.get(link.key, 0)) for link in links if not link.stats.is_follower
        ]
        key = choose(candidates, num_tokens, options)
        return next((link for link in links if link.key == key), None)

    def max_tokens(self, link: InstanceLink) -> int:
        """Tokens that one request may ever have over `link`, in the shape its instance runs now."""
        stats, capacity = link.stats, link.capacity
        if stats.is_follower:
            return 0
        return min(stats.max_model_len or capacity.max_model_len, kv_tokens(stats, capacity))

    def sent(self, link: InstanceLink, num_tokens: int) -> None:
        """A request of `num_tokens` went out over `link`."""
        unseen = self._unseen.setdefault(link.key, _Unseen())
        unseen.entries.append((link.stats.step, self._clock(), num_tokens))
        unseen.num_tokens += num_tokens

    def forget(self, key: InstanceKey) -> None:
        """That incarnation is gone."""
        self._unseen.pop(key, None)

    def _candidate(self, link: InstanceLink, now_s: float, num_priority: int) -> Candidate:
        unseen = self._unseen.setdefault(link.key, _Unseen())
        unseen.prune(link.stats.step, now_s)
        return Candidate.of(
            link.key,
            link.stats,
            link.capacity,
            num_unseen=len(unseen.entries),
            unseen_tokens=unseen.num_tokens,
            num_priority=num_priority,
        )
