"""Requests between two instances: one has sent them back to their ingresses, and no other has got them yet.

A switch leaves what waits to the ingresses, which send it again. Meanwhile no instance counts it as its load.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pengserve.planners.columns import Ints

LOST_S = 5.0  # after which those that have not come are taken to have ended: their clients left


@dataclass(frozen=True, slots=True)
class Away:
    """A value: a look returns the next one."""

    count: int = 0  # of the whole cluster
    sent_back: Mapping[int, int] = field(default_factory=dict)  # by the instance that they left
    left_s: float = 0.0  # when the newest of them did

    def seen(self, ids: Ints, sent_back: Ints, sent_again: Ints, now_s: float) -> "Away":
        """With what each instance has sent back, and has got, since the look before."""
        num_back, num_again = int(sent_back.sum()), int(sent_again.sum())
        if num_back:
            known = self.sent_back if self.count else {}
            leaving = {int(i): int(n) for i, n in zip(ids, sent_back, strict=True) if n}
            newest = {i: known.get(i, 0) + leaving.get(i, 0) for i in {**known, **leaving}}
            return Away(max(0, self.count + num_back - num_again), newest, now_s)
        if not self.count:
            return self
        is_lost = now_s - self.left_s > LOST_S
        return Away() if is_lost else replace(self, count=max(0, self.count - num_again))

    def of(self, members: Iterable[int]) -> float:
        """Those that left some instances, and most likely go on there: what took them apart put these together."""
        if not self.count:
            return 0.0
        return self.count * sum(self.sent_back.get(member, 0) for member in members) / sum(self.sent_back.values())
