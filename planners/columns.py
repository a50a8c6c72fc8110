"""Numbers of many instances as numpy columns: a planner that looks at a thousand of them counts in these.

What follows from a layout alone is made once for each layout, since it stays the same object from look to look.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import InstanceSnapshot, KvCapacity

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

S = TypeVar("S")
V = TypeVar("V")


class Kept(Generic[S, V]):
    """A function of an immutable value that keeps its newest answer, for as long as it is asked of the same object."""

    def __init__(self, make: Callable[[S], V]) -> None:
        self._make = make
        self._newest: tuple[S, V] | None = None

    def __call__(self, source: S) -> V:
        newest = self._newest
        if newest is None or newest[0] is not source:
            newest = self._newest = source, self._make(source)
        return newest[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupTable:
    """What follows from the groups of a layout alone. A position is that of a group in `groups`."""

    groups: tuple[Group, ...]
    leaders: list[InstanceId]
    shapes: list[str]
    wide: list[int]  # positions of groups with more than one member
    members: frozenset[InstanceId]
    position_of: Mapping[InstanceId, int]  # of each member's group
    group_of: Mapping[InstanceId, Group]
    leader_set: frozenset[InstanceId]
    leader_ids: Ints
    is_dp: Bools

    @classmethod
    def of(cls, groups: tuple[Group, ...]) -> "GroupTable":
        """The table of `groups`, which are disjoint."""
        leaders = [group.members[0] for group in groups]
        position_of = {member: at for at, group in enumerate(groups) for member in group.members}
        return cls(
            groups=groups,
            leaders=leaders,
            shapes=[group.shape for group in groups],
            wide=[at for at, group in enumerate(groups) if len(group.members) > 1],
            members=frozenset(position_of),
            position_of=position_of,
            group_of={member: groups[at] for member, at in position_of.items()},
            leader_set=frozenset(leaders),
            leader_ids=ints(leaders),
            is_dp=np.array([group.kind is GroupKind.DP for group in groups], dtype=np.bool_),
        )


_table = Kept(GroupTable.of)


@lru_cache(maxsize=4)
def _without(table: GroupTable, missing: frozenset[InstanceId]) -> GroupTable:
    """The table without the groups of `missing` members; kept, since one may be missing for many looks."""
    return GroupTable.of(tuple(group for group in table.groups if missing.isdisjoint(group.members)))


def whole_groups(groups: tuple[Group, ...], instances: Mapping[InstanceId, InstanceSnapshot]) -> GroupTable:
    """The table of those of a layout's `groups` whose members are all in `instances`."""
    table = _table(groups)
    if table.members <= instances.keys():
        return table
    return _without(table, table.members.difference(instances))


def ints(values: Iterable[int]) -> Ints:
    """A column."""
    return np.array(list(values), dtype=np.int64)


def lane_capacity(instance: InstanceSnapshot | None, shape: str) -> KvCapacity | None:
    """What `instance` can hold in `shape`; None where it cannot run it."""
    if instance is None:
        return None
    for lane in instance.lanes:
        if lane.shape == shape:
            return lane.capacity
    return instance.capacity if shape == GroupKind.DP else None


def capacities(instances: Sequence[InstanceSnapshot], shape: str) -> list[KvCapacity | None]:
    """What each of `instances` can hold in `shape`; None where it cannot run it. As `lane_capacity`, for many."""
    if not instances:
        return []
    # Instances are alike: what is in one place in the first is there in the others, or is looked for.
    at = next((at for at, lane in enumerate(instances[0].lanes) if lane.shape == shape), 0)
    return [
        lanes[at].capacity if len(lanes := i.lanes) > at and lanes[at].shape == shape else lane_capacity(i, shape)
        for i in instances
    ]
