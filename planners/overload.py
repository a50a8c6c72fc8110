"""How much KV memory each group needs, now and in a moment (KunServe sections 2.2 and 4.1).

    demand = resident + queued + growth, in blocks of a dp lane

    resident  blocks that running requests hold
    queued    blocks that waiting requests need for what they have: those at the head of the queue that a free slot
              would take, and a share of those that wait at ingresses
    growth    what is predicted to come within `horizon_s`: the slope of resident + queued over the last looks

So a group that fills up counts as overloaded before it is full, and before vLLM's scheduler preempts a request.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pengserve.planners.columns import Bools, GroupTable, Ints, ReadyInstances, ready_instances, rows, whole_groups
from pengserve.planners.demand_trend import MIN_GAP_S as MIN_GAP_S
from pengserve.planners.demand_trend import DemandTrend as DemandTrend
from pengserve.planners.demand_trend import DemandTrends
from pengserve.planners.load import lane_capacity
from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot
from pengserve.planners.types.units import blocks_for


class GroupDemand(NamedTuple):
    """Memory that one group of the layout needs and has, in blocks of a dp lane.

    A tuple, as a look at a thousand overloaded instances makes as many.
    """

    group: Group
    capacity_blocks: int = 0
    resident_blocks: int = 0
    queued_blocks: int = 0
    growth_blocks: int = 0  # never negative
    num_running: int = 0
    num_waiting: int = 0
    num_paused: int = 0  # of all members
    bytes_per_block: int = 0
    is_known: bool = True  # False where the newest stats are not of this shape

    @property
    def demand_blocks(self) -> int:
        """Blocks it needs within the horizon."""
        return self.resident_blocks + self.queued_blocks + self.growth_blocks

    @property
    def share(self) -> float:
        """Demand as a share of what it holds; above 1 requests wait or are preempted."""
        return self.demand_blocks / max(1, self.capacity_blocks)


class GroupDemands(Mapping[InstanceId, GroupDemand]):
    """The demand of each group of a layout by member, in columns; a value is made when it is asked for.

    Column `i` is of group `i` of `table`; all are 0 where the group is not known, but for `num_paused`.
    """

    def __init__(self, table: GroupTable, columns: "_Columns") -> None:
        self.table, self.columns = table, columns
        self._made: dict[int, GroupDemand] = {}

    def __getitem__(self, member: InstanceId) -> GroupDemand:
        position = self.table.position_of[member]
        found = self._made.get(position)
        return found if found is not None else self.at(position)

    def __iter__(self) -> Iterator[InstanceId]:
        return iter(self.table.position_of)

    def __len__(self) -> int:
        return len(self.table.position_of)

    def at(self, position: int) -> GroupDemand:
        """The demand of the group at this position."""
        return self.many(np.array([position]))[0]

    def many(self, positions: Ints) -> tuple[GroupDemand, ...]:
        """The demands of the groups at these positions."""
        made, c, places = self._made, self.columns, positions.tolist()
        new = np.array([at for at in places if at not in made], dtype=np.int64) if made else positions
        if len(new):
            blocks = (c.capacity_blocks, c.resident_blocks, c.queued_blocks, c.growth_blocks)
            numbers = (*blocks, c.num_running, c.num_waiting, c.num_paused, c.bytes_per_block, c.is_known)
            groups = [self.table.groups[at] for at in new.tolist()]
            # In the order of the fields.
            made.update(zip(new.tolist(), rows(GroupDemand, groups, *(n[new].tolist() for n in numbers)), strict=True))
        return tuple([made[at] for at in places])


@dataclass(slots=True, kw_only=True)
class _Columns:
    """`GroupDemand` of many groups, a column a field."""

    capacity_blocks: Ints
    resident_blocks: Ints
    queued_blocks: Ints
    growth_blocks: Ints
    num_running: Ints
    num_waiting: Ints
    num_paused: Ints
    bytes_per_block: Ints
    is_known: Bools

    @property
    def demand_blocks(self) -> Ints:
        """As `GroupDemand.demand_blocks`."""
        return self.resident_blocks + self.queued_blocks + self.growth_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand:
    """The cluster's groups whose members are all READY, indexed for the planners of drops and restores."""

    instances: ReadyInstances
    by_member: GroupDemands
    overloaded_at: Ints = field(compare=False)  # positions of the groups above `drop_above`

    @property
    def is_short(self) -> bool:
        """Whether memory is short anywhere."""
        return len(self.overloaded_at) > 0

    @property
    def overloaded(self) -> tuple[GroupDemand, ...]:
        """The groups above `drop_above`, in the order of the layout."""
        return self.by_member.many(self.overloaded_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandHistory:
    """What the prediction remembers from look to look. A value: a call returns the next one."""

    trends: DemandTrends = field(default_factory=DemandTrends)  # by leader


def predict_demand(
    snapshot: ClusterSnapshot, config: DropConfig, history: DemandHistory
) -> tuple[MemoryDemand, DemandHistory]:
    """The demand of each group whose members are all READY, and what to remember for the next call.

    Where a leader's stats are of another shape, its group's demand is unknown: it is neither overloaded nor quiet.
    """
    instances = ready_instances(snapshot.instances)
    table = whole_groups(snapshot.layout.groups, instances)
    columns = _columns(table, instances)
    blocks = columns.resident_blocks + columns.queued_blocks
    trends = history.trends.longer(table, blocks, columns.is_known, snapshot.time_s)
    growth_blocks = np.rint(trends.blocks_per_s() * config.horizon_s).astype(np.int64)
    columns.growth_blocks = np.where(columns.is_known, growth_blocks, 0)
    _add_ingresses(snapshot, columns)
    is_short = columns.is_known & (columns.demand_blocks > config.drop_above * columns.capacity_blocks)
    by_member = GroupDemands(table, columns)
    found = MemoryDemand(instances=instances, by_member=by_member, overloaded_at=np.flatnonzero(is_short))
    return found, DemandHistory(trends=trends)


def group_demand(group: Group, instances: Mapping[InstanceId, InstanceSnapshot]) -> GroupDemand:
    """The demand of `group` as its leader tells it, without growth. `instances` has all of its members."""
    leader = instances[group.members[0]]
    stats, lane, alone = leader.stats, lane_capacity(leader, group.shape), lane_capacity(leader, GroupKind.DP)
    num_paused = sum(instances[member].stats.num_paused for member in group.members)
    if lane is None or alone is None or stats.shape != group.shape or stats.is_follower:
        return GroupDemand(group=group, num_paused=num_paused, is_known=False)
    block_size = max(1, stats.block_size or lane.block_size)
    # A tp block has more tokens and takes its bytes at each member: it counts as so many dp blocks.
    width = max(1, block_size // max(1, alone.block_size))
    queued_blocks = blocks_for(stats.queued_tokens, block_size) * width
    if stats.num_waiting:
        free_slots = max(0, lane.max_num_seqs - stats.num_running)
        queued_blocks = queued_blocks * min(free_slots, stats.num_waiting) // stats.num_waiting
    return GroupDemand(
        group=group,
        capacity_blocks=(stats.kv_blocks_total or lane.num_blocks) * width,
        resident_blocks=stats.kv_blocks_used * width,
        queued_blocks=queued_blocks,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_paused=num_paused,
        bytes_per_block=alone.bytes_per_block,
    )


def _columns(table: GroupTable, instances: ReadyInstances) -> _Columns:
    """`group_demand` of all groups of `table`, a group an entry."""
    leaders, alone = table.leader_ids, instances.lanes(GroupKind.DP)
    lane = {name: alone[name][leaders] for name in ("num_blocks", "block_size", "max_num_seqs")}
    is_known = instances.runs(table) & alone.exists[leaders]
    is_known &= instances.stat("is_follower")[leaders] == 0
    paused = instances.stat("num_paused")
    num_paused = paused[leaders]
    for alike in table.wide:
        lanes, first = instances.lanes(alike.shape), alike.members[:, 0]
        for name, values in lane.items():
            values[alike.at] = lanes[name][first]
        is_known[alike.at] &= lanes.exists[first]
        num_paused[alike.at] = paused[alike.members].sum(axis=1)
    own, num_blocks = instances.stat("block_size")[leaders], instances.stat("kv_blocks_total")[leaders]
    block_size = np.where(own, own, lane["block_size"]).clip(1)
    num_blocks = np.where(num_blocks, num_blocks, lane["num_blocks"])
    num_running, num_waiting = instances.stat("num_running")[leaders], instances.stat("num_waiting")[leaders]
    width = (block_size // alone["block_size"][leaders].clip(1)).clip(1)
    queued_blocks = -(-instances.stat("queued_tokens")[leaders] // block_size) * width
    free_slots = (lane["max_num_seqs"] - num_running).clip(0)
    is_queue = num_waiting > 0
    head_blocks = queued_blocks * np.minimum(free_slots, num_waiting) // np.where(is_queue, num_waiting, 1)
    return _Columns(
        capacity_blocks=num_blocks * width * is_known,
        resident_blocks=instances.stat("kv_blocks_used")[leaders] * width * is_known,
        queued_blocks=np.where(is_queue, head_blocks, queued_blocks) * is_known,
        growth_blocks=np.zeros_like(width),
        num_running=num_running * is_known,
        num_waiting=num_waiting * is_known,
        num_paused=num_paused,
        bytes_per_block=alone["bytes_per_block"][leaders] * is_known,
        is_known=is_known,
    )


def _add_ingresses(snapshot: ClusterSnapshot, columns: _Columns) -> None:
    """Adds the requests that wait at ingresses: as long as others are, spread as capacity is.

    Where one waits that is too long for any route, more memory on the same instances is not what that ingress needs.
    """
    num_waiting = sum(d.num_waiting for d in snapshot.demands if not d.longest_waiting_tokens)
    total_blocks = int(columns.capacity_blocks.sum())
    if not num_waiting or not total_blocks:
        return
    num_requests = int((columns.num_running + columns.num_waiting).sum())
    each_blocks = int((columns.resident_blocks + columns.queued_blocks).sum()) / max(1, num_requests)
    share = num_waiting * max(1.0, each_blocks) / total_blocks
    columns.queued_blocks = columns.queued_blocks + np.rint(share * columns.capacity_blocks).astype(np.int64)
