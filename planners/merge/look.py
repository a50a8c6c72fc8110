"""One call of the merge planner: what is free, what may be split, and the next step to a group."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from pengserve.planners.load import ClusterView
from pengserve.planners.merge.history import LoadHistory, Reason
from pengserve.planners.projection import tp_groups_by_work
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
    _is_harmful: dict[Group, bool] = field(default_factory=dict, init=False)  # that were asked for

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

    def useful(self, degrees: Iterable[int]) -> set[int]:
        """Those of `degrees` whose groups are of use to urgent requests."""
        return {degree for degree in set(degrees) if not self.urgency.is_slow(degree)}

    def harmful(self, groups: Collection[Group]) -> frozenset[Group]:
        """Those that urgent requests leave alone, because they cost others too much. To ask for several at once takes
        hardly longer than for one.
        """
        new = [group for group in groups if group not in self._is_harmful]
        found = self.urgency.harmful(self.view, new) if new else frozenset()
        self._is_harmful.update((group, group in found) for group in new)
        return frozenset(group for group in groups if self._is_harmful[group])

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

    def least_costly(self, degree: int, is_able: Callable[[Group], bool]) -> Group | None:
        """Of the tp groups of that degree for which `is_able` holds, the one with the least `cost`."""
        best: tuple[tuple[int, float, int, tuple[InstanceId, ...]], Group] | None = None
        for goal, bound in tp_groups_by_work(self.view, degree):
            if best is not None and best[0] <= (*bound, 0, goal.members):
                break  # so do all others cost at least
            if is_able(goal):
                pair = self.cost(goal), goal
                best = pair if best is None else min(best, pair, key=itemgetter(0))
        return None if best is None else best[1]

    @property
    def num_requests(self) -> int:
        """Requests that run or wait anywhere."""
        return sum(load.num_requests for load in self.view.loads.values())
