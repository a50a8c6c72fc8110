"""What makes room for a queue that stands is judged by the mean of some looks.

One look's gain is noisy: with 22 requests waiting, looks half a second apart were measured to differ by a fifth of all
that was predicted, since one answer had ended. The best of twenty such looks is over any margin sooner or later. The
first look at a queue decides alone, so a burst is met at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pengserve.planners.columns import ReadyInstances
from pengserve.planners.judge.changes import What
from pengserve.planners.judge.prediction import Priced

MOST_LOOKS = 8  # that a mean is of: a newer look counts for an eighth at least
KEPT_S = 2.0  # a change that is not priced for so long is forgotten: memory is no longer short


@dataclass(frozen=True, slots=True)
class Mean:
    """Request-seconds of one change, over the looks since its queue began."""

    num_looks: int = 0
    gain_s: float = 0.0
    kept_s: float = 0.0
    seen_s: float = 0.0  # time of the newest look

    def with_look(self, priced: Priced, now_s: float) -> "Mean":
        """With a newer look."""
        num_looks = min(self.num_looks + 1, MOST_LOOKS)
        gain_s = self.gain_s + (priced.gain_s - self.gain_s) / num_looks
        kept_s = self.kept_s + (priced.kept_s - self.kept_s) / num_looks
        return Mean(num_looks, gain_s, kept_s, now_s)


Means = Mapping[What, Mean]


def steadied(
    priced: Sequence[Priced], means: Means, instances: ReadyInstances, now_s: float
) -> tuple[tuple[Priced, ...], Means]:
    """`priced`, with the mean gain of what makes room where requests wait; and `means` with this look.

    The mean of a change ends with the queue of its members.
    """
    waiting = instances.stat("num_waiting")
    found = list[Priced]()
    after = {what: mean for what, mean in means.items() if now_s - mean.seen_s <= KEPT_S}
    for one in priced:
        change, what = one.change, one.change.what
        if change.makes_room:
            mean = after.pop(what, Mean())
            if waiting[[member for group in change.before for member in group.members]].any():
                after[what] = mean = mean.with_look(one, now_s)
                one = replace(one, gain_s=mean.gain_s, kept_s=mean.kept_s, num_looks=mean.num_looks)
        found.append(one)
    return tuple(found), after
