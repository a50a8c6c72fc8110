"""What the merge planner asks of groups for urgent requests; `judge.urgency` answers where steps have a price."""

from collections.abc import Sequence
from typing import Protocol

from pengserve.planners.load import ClusterView
from pengserve.planners.types.layout import Group


class Urgency(Protocol):
    """Says which tensor-parallel groups urgent requests get."""

    def is_slow(self, degree: int) -> bool:
        """Whether groups of so many are of no use to them."""
        ...

    def harmful(self, view: ClusterView, groups: Sequence[Group]) -> frozenset[Group]:
        """Those of `groups`, which stand or could be formed, that cost others too much."""
        ...


class AnyGroup:
    """Where nothing is known of groups they get any."""

    def is_slow(self, degree: int) -> bool:
        """No."""
        return False

    def harmful(self, view: ClusterView, groups: Sequence[Group]) -> frozenset[Group]:
        """None of them."""
        return frozenset()


ANY_GROUP = AnyGroup()
