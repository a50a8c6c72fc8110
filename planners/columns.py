"""Numbers of many instances as numpy columns: a planner that looks at a thousand of them counts in these.

What follows from a layout alone is made once for each layout, since it stays the same object from look to look.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import chain
from operator import attrgetter, eq, is_, itemgetter
from typing import Generic, TypeVar, TypeVarTuple, cast

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import (
    NUMBERS,
    PACKED_WIDTH,
    InstanceSnapshot,
    InstanceState,
    KvCapacity,
    LaneInfo,
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

S = TypeVarTuple("S")
V = TypeVar("V")
N = TypeVar("N", bound=tuple[object, ...])
A = TypeVar("A", np.int64, np.float64, np.bool_)


class Kept(Generic[*S, V]):
    """A function of immutable values that keeps its newest answer, for as long as it is asked of the same objects."""

    def __init__(self, make: Callable[[*S], V]) -> None:
        self._make = make
        self._newest: tuple[tuple[*S], V] | None = None

    def __call__(self, *sources: *S) -> V:
        newest = self._newest
        if newest is None or not all(map(is_, newest[0], sources)):
            newest = self._newest = sources, self._make(*sources)
        return newest[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alike:
    """The groups of a layout that have one shape."""

    shape: str
    kind: GroupKind
    at: Ints  # positions of the groups
    members: Ints  # [group, place]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupTable:
    """What follows from the groups of a layout alone. A position is that of a group in `groups`."""

    groups: tuple[Group, ...]
    leaders: list[InstanceId]
    shapes: list[str]
    wide: tuple[Alike, ...]  # those with more than one member
    of_kind: Mapping[GroupKind, tuple[Group, ...]]  # the same in the layout's order, tp and pp
    members: frozenset[InstanceId]
    size: int  # above all members
    position_of: Mapping[InstanceId, int]  # of each member's group
    group_of: Mapping[InstanceId, Group]
    leader_set: frozenset[InstanceId]
    leader_ids: Ints
    is_dp: Bools

    def is_wide(self, member: InstanceId) -> bool:
        """Whether `member` is in a group of several."""
        group = self.group_of.get(member)
        return group is not None and len(group.members) > 1

    @classmethod
    def of(cls, groups: tuple[Group, ...]) -> "GroupTable":
        """The table of `groups`, which are disjoint. Each switch calls for a new one, so it is made without loops."""
        members_of = list(map(_MEMBERS, groups))
        degrees = np.fromiter(map(len, members_of), dtype=np.int64, count=len(groups))
        members = list(chain.from_iterable(members_of))
        positions = np.repeat(np.arange(len(groups)), degrees).tolist()
        leaders = list(map(itemgetter(0), members_of))
        is_dp = degrees == 1
        shapes = [str(GroupKind.DP)] * len(groups)
        by_shape: dict[str, list[int]] = {}
        several = np.flatnonzero(~is_dp).tolist()
        for at in several:
            shapes[at] = groups[at].shape
            by_shape.setdefault(shapes[at], []).append(at)
        return cls(
            groups=groups,
            leaders=leaders,
            shapes=shapes,
            wide=tuple(
                Alike(shape=shape, kind=groups[at[0]].kind, at=ints(at), members=np.array([members_of[i] for i in at]))
                for shape, at in by_shape.items()
            ),
            of_kind={
                kind: tuple(groups[at] for at in several if groups[at].kind is kind)
                for kind in (GroupKind.TP, GroupKind.PP)
            },
            members=frozenset(members),
            size=max(members, default=-1) + 1,
            position_of=dict(zip(members, positions, strict=True)),
            group_of=dict(zip(members, map(groups.__getitem__, positions), strict=True)),
            leader_set=frozenset(leaders),
            leader_ids=ints(leaders),
            is_dp=is_dp,
        )


group_table = Kept(GroupTable.of)


@lru_cache(maxsize=4)
def _without(table: GroupTable, missing: frozenset[InstanceId]) -> GroupTable:
    """The table without the groups of `missing` members; kept, since one may be missing for many looks."""
    return GroupTable.of(tuple(group for group in table.groups if missing.isdisjoint(group.members)))


def whole_groups(groups: tuple[Group, ...], instances: Mapping[InstanceId, InstanceSnapshot]) -> GroupTable:
    """The table of those of a layout's `groups` whose members are all in `instances`."""
    table = group_table(groups)
    if table.members <= instances.keys():
        return table
    return _without(table, table.members.difference(instances))


class ReadyInstances(dict[InstanceId, InstanceSnapshot]):
    """The READY instances of one look, and their numbers in columns by instance id: 0 for an id that is not READY.

    They are made when the first planner asks for one; the others of the same look find them.
    """

    def __init__(self, instances: tuple[InstanceSnapshot, ...]) -> None:
        ready = InstanceState.READY
        known = [i for i in instances if i.state is ready]
        super().__init__(zip(map(_ID, known), known, strict=True))
        self.ids = ints(self)
        self.size = max(self if len(known) == len(instances) else map(_ID, instances), default=-1) + 1
        self._stats = list(map(_STATS, known))
        self._numbers: Ints | None = None  # of all stats, `[number, one of ids]`
        self._columns: dict[str, Ints] = {}  # of these by instance id, that were asked for
        lanes = list(map(_LANES, known))
        self._common_lanes: tuple[LaneInfo, ...] = ()  # where all have the same, as in most clusters
        if lanes and lanes.count(lanes[0]) == len(lanes):
            self._common_lanes = lanes[0]
        self._lanes: dict[str, LaneColumns] = {}
        self._runs: tuple[GroupTable, Bools] | None = None

    def stat(self, name: str) -> Ints:
        """The whole numbers that their stats have by that name."""
        if name not in self._columns:
            self._columns[name] = spread(self.ids, self._packed()[_PLACE_OF[name]], self.size)
        return self._columns[name]

    def stats(self, names: Sequence[str]) -> Ints:
        """The whole numbers that their stats have by these names, `[name, one of ids]`."""
        return self._packed()[[_PLACE_OF[name] for name in names]]

    def _packed(self) -> Ints:
        if self._numbers is None:
            found = np.frombuffer(b"".join(map(_PACKED, self._stats)), dtype=np.int64)
            self._numbers = found.reshape(-1, PACKED_WIDTH)[:, : len(NUMBERS)].T
        return self._numbers

    @cached_property
    def run(self) -> list[str]:
        """The shape that each of `ids` says it runs."""
        return list(map(_SHAPE_OF_STATS, self._stats))

    @cached_property
    def shapes(self) -> list[str]:
        """By instance id, the shape that each says it runs; empty for an id that is not READY."""
        if len(self) == self.size and (self.ids[:-1] < self.ids[1:]).all():
            return self.run
        found = [""] * self.size
        for at, shape in zip(self, self.run, strict=True):
            found[at] = shape
        return found

    def lanes(self, shape: str) -> "LaneColumns":
        """What they can hold in `shape`."""
        if shape not in self._lanes:
            self._lanes[shape] = LaneColumns(self, shape)
        return self._lanes[shape]

    def common_lane(self, shape: str) -> KvCapacity | None:
        """What each of them can hold in `shape`; None where they differ, or cannot run it."""
        return next((lane.capacity for lane in self._common_lanes if lane.shape == shape), None)

    def runs(self, table: GroupTable) -> Bools:
        """Whether the leader of each of `table`'s groups says that it runs the group's shape."""
        if self._runs is None or self._runs[0] is not table:
            said = map(self.shapes.__getitem__, table.leaders)
            self._runs = table, np.fromiter(map(eq, said, table.shapes), dtype=np.bool_, count=len(table.leaders))
        return self._runs[1]


class LaneColumns:
    """What the instances of a look can hold in one shape, in columns by instance id: 0 where one cannot run it."""

    def __init__(self, ready: ReadyInstances, shape: str) -> None:
        common, self._size = ready.common_lane(shape), ready.size
        if common is not None:
            self._ids, self._known = ready.ids, [common]
        else:
            found = capacities(list(ready.values()), shape)
            self._ids = ready.ids[np.array([lane is not None for lane in found], dtype=np.bool_)]
            self._known = [lane for lane in found if lane is not None]  # of each of `_ids`, or one of all of them
        self.exists = spread(self._ids, np.array([True]), ready.size)
        self._columns: dict[str, Ints] = {}

    def __getitem__(self, name: str) -> Ints:
        """The column of one field of `KvCapacity`."""
        if name not in self._columns:
            self._columns[name] = spread(self._ids, column(self._known, name), self._size)
        return self._columns[name]


ready_instances = Kept(ReadyInstances)


def spread(ids: Ints, values: NDArray[A], size: int) -> NDArray[A]:
    """The column by instance id of the `values` of `ids`; 0 where nothing is known."""
    found = np.zeros(size, dtype=values.dtype)
    found[ids] = values
    return found


def rows(make: type[N], *columns: Iterable[object]) -> Iterator[N]:
    """A named tuple of each row of `columns`, which are its fields in their order.

    As `map(make, *columns)`, but without the `__new__` in Python that a look at a thousand would wait for.
    """
    return map(cast(Callable[[tuple[object, ...]], N], partial(tuple.__new__, make)), zip(*columns, strict=True))


def ints(values: Iterable[int]) -> Ints:
    """A column."""
    return np.fromiter(values, dtype=np.int64)


def column(values: Sequence[object], name: str) -> Ints:
    """A column of the whole numbers that all of `values` have by that name."""
    return np.fromiter(map(attrgetter(name), values), dtype=np.int64, count=len(values))


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
    # Instances are alike: what is in one place in the first is there in the others, or is looked for one by one.
    at = next((at for at, lane in enumerate(instances[0].lanes) if lane.shape == shape), 0)
    try:
        lanes = list(map(itemgetter(at), map(_LANES, instances)))
    except IndexError:
        return [lane_capacity(i, shape) for i in instances]
    if list(map(_SHAPE, lanes)).count(shape) == len(lanes):
        return list(map(_CAPACITY, lanes))
    return [lane_capacity(i, shape) for i in instances]


_LANES, _SHAPE, _CAPACITY = attrgetter("lanes"), attrgetter("shape"), attrgetter("capacity")
_PACKED, _PLACE_OF = attrgetter("packed"), {name: place for place, name in enumerate(NUMBERS)}
_MEMBERS, _STATS, _SHAPE_OF_STATS = attrgetter("members"), attrgetter("stats"), attrgetter("shape")
_ID = attrgetter("key.instance_id")
