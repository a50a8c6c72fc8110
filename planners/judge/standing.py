"""What makes room is judged by the mean of its newest looks, unless a queue has just begun.

One look's gain is noisy: with 22 requests waiting, looks half a second apart were measured to differ by a fifth of all
that was predicted, since one answer had ended. The best of twenty such looks is over any margin sooner or later. So a
queue that stands is judged by the mean of some, and so is memory that is nearly full where nothing waits yet. A queue
that has just begun is judged by the newest look, and so is memory that will not do: a burst is met at once.
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
class Need:
    """Since when the members of a change have needed room without a break."""

    since_s: float
    is_queue: bool  # requests wait, or else memory is nearly full
    looks: tuple[Look, ...] = ()  # the newest ones

    def with_look(self, look: Look) -> "Need":
        """With a newer look, and without those that are too old."""
        recent = (one for one in self.looks if look.at_s - one.at_s <= STANDS_S)
        return replace(self, looks=(*recent, look))

    def judged(self, priced: Priced) -> Priced:
        """`priced` at the newest look, with what it is to be judged by."""
        num_looks, age_s = len(self.looks), self.looks[-1].at_s - self.since_s
        if self.is_queue and age_s < STANDS_S:
            return priced
        # Of memory that is nearly full, the time before the first look counts as time without any gain.
        gain_s = min(1.0, age_s / STANDS_S) * sum(look.gain_s for look in self.looks) / num_looks
        kept_s = sum(look.kept_s for look in self.looks) / num_looks
        return replace(priced, gain_s=gain_s, kept_s=kept_s, num_looks=num_looks)


Needs = Mapping[What, Need]


def steadied(
    priced: Sequence[Priced], needs: Needs, instances: ReadyInstances, now_s: float
) -> tuple[tuple[Priced, ...], Needs]:
    """`priced`, with the mean gain of what makes room and is not urgent; and `needs` with this look."""
    waiting = instances.stat("num_waiting")
    found = list[Priced]()
    after = {what: need for what, need in needs.items() if now_s - need.looks[-1].at_s <= STANDS_S}
    for one in priced:
        change = one.change
        if change.makes_room:
            is_queue = bool(waiting[[member for group in change.before for member in group.members]].any())
            need = after.pop(change.what, None)
            if is_queue or change.can_wait:
                if need is None or need.is_queue is not is_queue:
                    need = Need(now_s, is_queue)
                after[change.what] = need = need.with_look(Look(now_s, one.gain_s, one.kept_s))
                one = need.judged(one)
        found.append(one)
    return tuple(found), after
