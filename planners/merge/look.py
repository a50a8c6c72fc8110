"""One call of the merge planner: what is free, what may be split, and the next step to a group."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pengserve.planners.load import ClusterView
from pengserve.planners.merge.history import LoadHistory, Reason
from pengserve.planners.steps import can_split, next_step, split_first
from pengserve.planners.types.config import MergeConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group
from pengserve.planners.urgency import Urgency

YOUNG_S = 1.0  # a new group is not split: what it was made for is still on its way


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next primitive, why, and how."""

    group: Group
    is_merge: bool
    reason: Reason
    why: str
    strategy: str


@dataclass(slots=True, kw_only=True)
class Look:
    """One call's working state: what is free, and what may be split.

    `claimed` begins with what switches, and grows from reason to reason.
    """

    view: ClusterView
    config: MergeConfig
    history: LoadHistory
    claimed: dict[InstanceId, Group]
    urgency: Urgency

    @property
    def now_s(self) -> float:
        return self.view.snapshot.time_s

    def claim(self, group: Group) -> None:
        self.claimed.update(dict.fromkeys(group.members, group))

    def is_free(self, members: Iterable[InstanceId]) -> bool:
        """Whether no reason has claimed any of `members`, or a group that one of them would have to leave."""
        return not any(m in self.claimed for group in self.view.groups_over(members) for m in group.members)

    def age_s(self, group: Group) -> float:
        return self.now_s - self.history.running_groups[group].since_s

    def useful_degrees(self, groups: Iterable[Group]) -> set[int]:
        """Those of `groups` that are of use to urgent requests."""
        return {degree for degree in {group.degree for group in groups} if not self.urgency.is_slow(degree)}

    def harmful(self, groups: Sequence[Group]) -> frozenset[Group]:
        """Those that urgent requests leave alone, because they cost others too much."""
        return self.urgency.harmful(self.view, groups)

    def may_split(self, group: Group) -> bool:
        return self.age_s(group) >= YOUNG_S and can_split(self.view, group)

    def tp_groups(self) -> list[Group]:
        return [group for group in self.history.running_groups if group.leader in self.view.loads]

    def step_to(self, goal: Group, reason: Reason, why: str, strategy: str) -> Step | None:
        """The next step to `goal`; None while it must wait."""
        found = next_step(self.view, goal, self.may_split)
        if found is None:
            return None
        group, is_merge = found
        why = why if is_merge else f"{why}; {goal} needs its members"
        return Step(group=group, is_merge=is_merge, reason=reason, why=why, strategy=strategy)

    def is_possible(self, goal: Group) -> bool:
        """Whether nothing claimed is in the way of `goal`, and no step towards it must wait."""
        return self.is_free(goal.members) and next_step(self.view, goal, lambda g: can_split(self.view, g)) is not None

    def cost(self, goal: Group) -> tuple[int, float, int, tuple[InstanceId, ...]]:
        """What forming `goal` disturbs: requests, then KV, then groups to split; ties go to the lowest rank."""
        parts = self.view.groups_over(goal.members)
        loads = [self.view.load(part) for part in parts]
        num_splits = len(split_first(self.view, goal))
        return sum(load.num_requests for load in loads), sum(load.kv_share for load in loads), num_splits, goal.members

    @property
    def num_requests(self) -> int:
        """Requests that run or wait anywhere."""
        return sum(load.num_requests for load in self.view.loads.values())
