"""Which replicated parameters to drop, so that requests find memory (KunServe Algorithm 1).

Instances that hold the same parameters become the stages of one pipeline; each keeps its own layers, and the memory of
the others holds KV. The more stages, the more is free and the slower is each request: so the smallest groups are
merged first, and only as far as memory is short.

The paper's priority queue by group size has one bucket for each power of two here, since a pipeline is an aligned run
of ranks of such a length: two halves merge into it. So it is one pass over what can be formed, the narrowest first, and
all pipelines of one length at once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pengserve.planners.columns import Bools, Ints, Kept, rows
from pengserve.planners.overload import MemoryDemand
from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import ClusterSnapshot

_SHOWN_GROUPS = 4


class Pipeline(NamedTuple):
    """A pipeline to form, and the memory of its members together, in blocks of a dp lane.

    A tuple, as a plan for a thousand instances makes hundreds.
    """

    group: Group
    demand_blocks: int
    held_blocks: int  # what its members hold now
    capacity_blocks: int  # what it will hold

    @property
    def freed_blocks(self) -> int:
        """What the dropped parameters leave."""
        return self.capacity_blocks - self.held_blocks

    @property
    def share(self) -> float:
        """Demand as a share of what there is now."""
        return self.demand_blocks / max(1, self.held_blocks)

    @property
    def why(self) -> str:
        """One sentence for people."""
        return (
            f"memory: {self.demand_blocks} blocks are needed, its members hold {self.held_blocks},"
            f" and without the parameters that they drop {self.capacity_blocks}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPlan:
    """Pipelines to form, the one whose members are shortest of memory first."""

    pipelines: tuple[Pipeline, ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups to form, disjoint."""
        return tuple(pipeline.group for pipeline in self.pipelines)

    @property
    def demand_blocks(self) -> int:
        """Blocks that all of the members need."""
        return sum(pipeline.demand_blocks for pipeline in self.pipelines)

    @property
    def freed_blocks(self) -> int:
        """Blocks that all of it frees."""
        return sum(pipeline.freed_blocks for pipeline in self.pipelines)

    @property
    def why(self) -> str:
        """One sentence for people."""
        return f"{_names(self.groups)} free {self.freed_blocks} blocks for a demand of {self.demand_blocks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What drops can do about the demand."""

    plan: DropPlan | None = None
    short: tuple[Group, ...] = ()  # overloaded groups of the layout that get too little room, or none
    why: str = ""  # why there is no plan, or what it leaves short

    @property
    def needs_instances(self) -> bool:
        """Whether memory stays short: vLLM preempts there as it always did, and more instances would help."""
        return bool(self.short)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Pipelines of one length that share no member, so that their order does not matter."""

    shape: str
    start: int  # of these among all pipelines
    members: Ints  # [group, place]
    size: int  # above all members


class _Search:
    """One call's working state: for each member the part that it is in, in columns by instance id.

    A part is a group of the layout, or a pipeline that is planned in place of some.
    """

    def __init__(self, demand: MemoryDemand, config: DropConfig, claimed: Collection[InstanceId], size: int) -> None:
        self.demand, self.config = demand, config
        self.leader = np.full(size, -1)  # the part's first member; -1: a member that must not become a part
        self.place = np.zeros(size, dtype=np.int64)  # in the part
        self.length = np.zeros(size, dtype=np.int64)
        self.demand_blocks = np.zeros(size, dtype=np.int64)
        self.held_blocks = np.zeros(size, dtype=np.int64)  # now
        self.capacity_blocks = np.zeros(size, dtype=np.int64)  # what it will hold; of the layout's, what it holds
        self.is_short = np.zeros(size, dtype=np.bool_)  # and should go on merging
        self.present_blocks = np.zeros(size, dtype=np.int64)  # of the demand, those that are not predicted
        self.has_room = np.zeros(size, dtype=np.bool_)  # a pipeline of the layout that is not short
        # Pipelines by first member, as their place among all. Some were merged into wider ones since.
        self.planned = np.full(size, -1)
        self._fill(claimed)

    def _fill(self, claimed: Collection[InstanceId]) -> None:
        """The groups of the layout that may become parts."""
        table, columns = self.demand.by_member.table, self.demand.by_member.columns
        is_fit = columns.is_known & (columns.num_paused == 0)
        self._put(np.flatnonzero(is_fit & table.is_dp), table.leader_ids[is_fit & table.is_dp][:, None])
        for alike in table.wide:
            if alike.kind is GroupKind.PP:
                fit = is_fit[alike.at]
                self._put(alike.at[fit], alike.members[fit])
        for member in claimed:
            if member in table.position_of:
                self.leader[list(table.groups[table.position_of[member]].members)] = -1

    def _put(self, at: Ints, members: Ints) -> None:
        """Groups at these positions of the layout; `members` is `[group, place]`."""
        columns = self.demand.by_member.columns
        blocks, held_blocks = columns.demand_blocks[at], columns.capacity_blocks[at]
        is_short: Bools = blocks > self.config.drop_above * held_blocks
        present_blocks = blocks - columns.growth_blocks[at]
        self._set(members, blocks, present_blocks, held_blocks, held_blocks, is_short)
        self.has_room[members] = (~is_short & (members.shape[1] > 1))[:, None]

    def _set(
        self, members: Ints, demand_blocks: Ints, present: Ints, held: Ints, capacity: Ints, is_short: Bools
    ) -> None:
        self.leader[members] = members[:, :1]
        self.place[members] = np.arange(members.shape[1])
        self.length[members] = members.shape[1]
        self.demand_blocks[members] = demand_blocks[:, None]
        self.present_blocks[members] = present[:, None]
        self.held_blocks[members] = held[:, None]
        self.capacity_blocks[members] = capacity[:, None]
        self.is_short[members] = is_short[:, None]
        self.has_room[members] = False

    def try_merge(self, bucket: Bucket) -> None:
        """Plans each group of `bucket` in place of its parts, where one of them is short and it frees memory."""
        at = np.flatnonzero(self._is_due(bucket.members))
        if not len(at):
            return
        at = at[self._is_union(bucket.members[at])]
        members = bucket.members[at]
        is_first = self.place[members] == 0
        demand_blocks = (self.demand_blocks[members] * is_first).sum(axis=1)
        present_blocks = (self.present_blocks[members] * is_first).sum(axis=1)
        held_blocks = (self.held_blocks[members] * is_first).sum(axis=1)
        parts_blocks = (self.capacity_blocks[members] * is_first).sum(axis=1)
        capacity_blocks = self._pipeline_blocks(members, bucket.shape)
        frees = capacity_blocks > parts_blocks
        is_short = demand_blocks > self.config.target * capacity_blocks
        columns = (members, demand_blocks, present_blocks, held_blocks, capacity_blocks, is_short)
        self._set(*(values[frees] for values in columns))
        self.planned[members[frees, 0]] = bucket.start + at[frees]

    def _is_due(self, members: Ints) -> Bools:
        """Whether memory is short in each row of `members`; where it would draw in a pipeline that has room, now."""
        is_full = self.present_blocks[members] > self.config.drop_above * self.capacity_blocks[members]
        is_worth = ~self.has_room[members].any(axis=1) | is_full.any(axis=1)
        return np.asarray(self.is_short[members].any(axis=1) & is_worth)

    def _is_union(self, members: Ints) -> Bools:
        """Whether each row of `members` is whole parts, one after the other, that nest in it (see `stages.nests`)."""
        leader, place, length = self.leader[members], self.place[members], self.length[members]
        if (length == 1).all():
            return np.asarray((leader >= 0).all(axis=1))  # instances that are alone, as most are
        start = np.arange(members.shape[1]) - place  # of the part, in the row
        fits = (leader >= 0) & (start >= 0) & (np.take_along_axis(members, start.clip(0), axis=1) == leader)
        whole: Bools = (length * (place == 0)).sum(axis=1) == members.shape[1]
        length = length.clip(1)
        times = members.shape[1] // length
        nests = (length == 1) | (
            (start % length == 0) & (times * length == members.shape[1]) & (times > 1) & (times & times - 1 == 0)
        )
        is_union: Bools = (fits & nests).all(axis=1) & whole
        return is_union

    def _pipeline_blocks(self, members: Ints, shape: str) -> Ints:
        """Blocks that each row would hold, which is what its narrowest member can; 0 where one has no such lane."""
        narrowest: Ints = self.demand.instances.lanes(shape)["num_blocks"][members].min(axis=1)
        return narrowest

    def pipelines(self, groups: Sequence[Group]) -> tuple[Pipeline, ...]:
        """What is planned of `groups`, the one whose members are shortest of memory first."""
        is_first = self.leader == np.arange(len(self.leader))
        firsts = np.flatnonzero((self.planned >= 0) & is_first & (self.capacity_blocks > self.held_blocks))
        shares = self.demand_blocks[firsts] / self.held_blocks[firsts].clip(1)
        firsts = firsts[np.lexsort((firsts, -shares))]
        planned = map(groups.__getitem__, self.planned[firsts].tolist())
        columns = (self.demand_blocks, self.held_blocks, self.capacity_blocks)
        return tuple(rows(Pipeline, planned, *(column[firsts].tolist() for column in columns)))

    def short(self) -> tuple[Group, ...]:
        """The overloaded groups of the layout that are still overloaded after all that is planned."""
        at, table = self.demand.overloaded_at, self.demand.by_member.table
        leaders = table.leader_ids[at]
        is_over = self.demand_blocks[leaders] > self.config.drop_above * self.capacity_blocks[leaders]
        is_short = (self.leader[leaders] < 0) | is_over
        return tuple(map(table.groups.__getitem__, at[is_short].tolist()))


def plan_drop(
    snapshot: ClusterSnapshot,
    demand: MemoryDemand,
    config: DropConfig,
    *,
    claimed: Collection[InstanceId] = (),
) -> Verdict:
    """The pipelines that make room for the overloaded groups.

    An overloaded group merges with its buddy, and the two with theirs, until the demand is at most the share `target`
    of what there is, or `max_stages` are reached. Only groups of the layout merge that are wholly READY, known, and not
    `claimed`; tp groups never do, and pipelines that stand grow: one that has room itself only where memory is short
    now, not in a moment, for it becomes slower for all that it serves. Where even the widest pipeline is not enough it
    is planned all the same: it runs more at once than its members can alone.
    """
    if not demand.is_short:
        return Verdict(why="no group is short of memory")
    groups, all_buckets = pipeline_buckets(snapshot.groups)
    buckets = [bucket for bucket in all_buckets if bucket.members.shape[1] <= config.max_stages]
    size = max([demand.by_member.table.size, *(bucket.size for bucket in buckets)])
    search = _Search(demand, config, claimed, size)
    for bucket in buckets:
        search.try_merge(bucket)
    short, pipelines = search.short(), search.pipelines(groups)
    if not pipelines:
        return Verdict(short=short, why=f"{_names(short)} are short of memory, and no pipeline can be formed of them")
    why = f"{_names(short)} stay short of memory" if short else ""
    return Verdict(plan=DropPlan(pipelines=pipelines), short=short, why=why)


def _make_buckets(groups: tuple[Group, ...]) -> tuple[tuple[Group, ...], tuple[Bucket, ...]]:
    """The pipelines among `groups`, the narrowest first, all and in buckets.

    Those of one length are disjoint as long as no rank has shifted under a pipeline that stands; one that overlaps
    others comes after those of lower rank.
    """
    ordered = sorted((g for g in groups if g.kind is GroupKind.PP), key=lambda g: (len(g.members), g.members))
    rounds: dict[tuple[int, int], list[Group]] = {}
    newest: dict[tuple[int, InstanceId], int] = {}  # the round that a member is in, for each length
    for group in ordered:
        length = len(group.members)
        round_ = 1 + max(newest.get((length, member), -1) for member in group.members)
        newest.update(((length, member), round_) for member in group.members)
        rounds.setdefault((length, round_), []).append(group)
    found: list[Group] = []
    buckets = []
    for _, bucket in sorted(rounds.items(), key=lambda item: item[0]):
        members = np.array([g.members for g in bucket], dtype=np.int64)
        shape, size = bucket[0].shape, 1 + int(members.max())
        buckets.append(Bucket(shape=shape, start=len(found), members=members, size=size))
        found += bucket
    return tuple(found), tuple(buckets)


pipeline_buckets = Kept(_make_buckets)
"""The pipelines among some groups, all and in buckets of one length."""


def _names(groups: Sequence[Group]) -> str:
    """At most a few names."""
    more = [f"{len(groups) - _SHOWN_GROUPS} more"] if len(groups) > _SHOWN_GROUPS else []
    return ", ".join([str(group) for group in groups[:_SHOWN_GROUPS]] + more)
