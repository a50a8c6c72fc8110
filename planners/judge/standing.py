"""What makes room for a queue that stands is judged by the mean of its newest looks.

One look's gain is noisy: with 22 requests waiting, looks half a second apart were measured to differ by a fifth of all
that was predicted, since one answer had ended. The best of twenty such looks is over any margin sooner or later. A
queue that has just begun is judged by the newest look, so a burst is met at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pengserve.planners.columns import ReadyInstances
from pengserve.planners.judge.changes import What
from pengserve.planners.judge.prediction import Priced

STANDS_S = 2.0  # a queue that is older stands; so old may looks be that are part of a mean


class Look(NamedTuple):
    """What one look said of a change, in request-seconds."""

    at_s: float
    gain_s: float
    kept_s: float


@dataclass(frozen=True, slots=True)
class Queue:
    """Requests that have waited without a break at the members of a change."""

    since_s: float
    looks: tuple[Look, ...] = ()  # the newest ones

    def with_look(self, look: Look) -> "Queue":
        """With a newer look, and without those that are too old."""
        recent = (one for one in self.looks if look.at_s - one.at_s <= STANDS_S)
        return Queue(self.since_s, (*recent, look))

    def judged(self, priced: Priced) -> Priced:
        """`priced` at the newest look, with what it is to be judged by."""
        num_looks = len(self.looks)
        if self.looks[-1].at_s - self.since_s < STANDS_S:
            return priced
        gain_s = sum(look.gain_s for look in self.looks) / num_looks
        kept_s = sum(look.kept_s for look in self.looks) / num_looks
        return replace(priced, gain_s=gain_s, kept_s=kept_s, num_looks=num_looks)


Queues = Mapping[What, Queue]


def steadied(
    priced: Sequence[Priced], queues: Queues, instances: ReadyInstances, now_s: float
) -> tuple[tuple[Priced, ...], Queues]:
    """`priced`, with the mean gain of what makes room for a queue that stands; and `queues` with this look."""
    waiting = instances.stat("num_waiting")
    found = list[Priced]()
    after = {what: queue for what, queue in queues.items() if now_s - queue.looks[-1].at_s <= STANDS_S}
    for one in priced:
        change = one.change
        if change.makes_room:
            queue = after.pop(change.what, Queue(now_s))
            if waiting[[member for group in change.before for member in group.members]].any():
                after[change.what] = queue = queue.with_look(Look(now_s, one.gain_s, one.kept_s))
                one = queue.judged(one)
        found.append(one)
    return tuple(found), after
