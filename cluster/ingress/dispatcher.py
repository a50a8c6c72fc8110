"""Which instance gets the next request: newest stats plus what was sent since, handed to the planner."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from pengserve.planners.dispatch import Candidate, choose
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
    """Picks the link with the least virtual KV load."""

    def __init__(self) -> None:
        self._unseen: dict[InstanceKey, _Unseen] = {}

    def choose(self, links: Sequence[InstanceLink], num_tokens: int) -> InstanceLink | None:
        """The link for a request that holds `num_tokens` already; None where none can ever hold it."""
        now_s = monotonic()
        key = choose([self._candidate(link, now_s) for link in links], num_tokens)
        return next((link for link in links if link.key == key), None)

    def sent(self, link: InstanceLink, num_tokens: int) -> None:
        """A request of `num_tokens` went out over `link`."""
        unseen = self._unseen.setdefault(link.key, _Unseen())
        unseen.entries.append((link.stats.step, monotonic(), num_tokens))
        unseen.num_tokens += num_tokens

    def forget(self, key: InstanceKey) -> None:
        """That incarnation is gone."""
        self._unseen.pop(key, None)

    def _candidate(self, link: InstanceLink, now_s: float) -> Candidate:
        unseen = self._unseen.setdefault(link.key, _Unseen())
        stats, block_size = link.stats, link.capacity.block_size
        unseen.prune(stats.step, now_s)
        return Candidate(
            key=link.key,
            resident_tokens=stats.kv_blocks_used * block_size,
            queued_tokens=stats.queued_tokens,
            unseen_tokens=unseen.num_tokens,
            capacity_tokens=link.capacity.num_tokens,
            num_requests=stats.num_running + stats.num_waiting + len(unseen.entries),
        )
