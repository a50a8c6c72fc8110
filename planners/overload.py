"""How much KV memory each group needs, now and in a moment (KunServe sections 2.2 and 4.1).

    demand = resident + queued + growth, in blocks of a dp lane

    resident  blocks that running requests hold
    queued    blocks that waiting requests need for what they have: those at the head of the queue that a free slot
              would take, and a share of those that wait at ingresses
    growth    what is predicted to come within `horizon_s`: the slope of resident + queued over the last looks

So a group that fills up counts as overloaded before it is full, and before vLLM preempts anybody.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

from pengserve.planners.load import lane_capacity
from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, InstanceState
from pengserve.planners.types.units import blocks_for

WINDOW_S = 2.5  # looks that a slope is taken from
MIN_GAP_S = 0.25  # between two looks that count
MIN_LOOKS = 3  # fewer tell no slope: a single step is an arrival, not a trend


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDemand:
    """Memory that one group of the layout needs and has, in blocks of a dp lane."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand:
    """The cluster's groups whose members are all READY, indexed for the planners of drops and restores."""

    instances: Mapping[InstanceId, InstanceSnapshot]  # READY ones
    by_member: Mapping[InstanceId, GroupDemand]
    overloaded: tuple[GroupDemand, ...] = ()  # above `drop_above`, in the order of the layout


@dataclass(frozen=True, slots=True)
class Trail:
    """What one group held and queued at the last looks, oldest first: (seconds, blocks)."""

    group: Group
    looks: tuple[tuple[float, int], ...]

    def blocks_per_s(self) -> float:
        """The median of the slopes between any two looks (Theil-Sen); 0 where it fell, or while there are too few.

        One arrival is one step: it changes fewer than half of the slopes, and none that counts.
        """
        if len(self.looks) < MIN_LOOKS or self.looks[-1][1] <= self.looks[0][1]:
            return 0.0
        slopes = sorted((b - a) / (later - at) for (at, a), (later, b) in combinations(self.looks, 2))
        return max(0.0, slopes[(len(slopes) - 1) // 2])


@dataclass(frozen=True, slots=True, kw_only=True)
class DemandHistory:
    """What the prediction remembers from look to look. A value: a call returns the next one."""

    trails: Mapping[InstanceId, Trail] = field(default_factory=dict)  # by leader


def predict_demand(
    snapshot: ClusterSnapshot, config: DropConfig, history: DemandHistory
) -> tuple[MemoryDemand, DemandHistory]:
    """The demand of each group whose members are all READY, and what to remember for the next call.

    Where a leader's stats are of another shape, its group's demand is unknown: it is neither overloaded nor quiet.
    """
    instances = {i.key.instance_id: i for i in snapshot.instances if i.state is InstanceState.READY}
    now_s, trails = snapshot.time_s, {}
    found: list[GroupDemand] = []
    for group in snapshot.layout.groups:
        if all(member in instances for member in group.members):
            leader = group.members[0]
            trail = history.trails.get(leader)
            if trail is not None and trail.group is not group and trail.group != group:
                trail = None
            demand = group_demand(group, instances)
            if demand.is_known:
                trail = _longer(trail, demand, now_s)
                growth_blocks = round(trail.blocks_per_s() * config.horizon_s)
                if growth_blocks:
                    demand = replace(demand, growth_blocks=growth_blocks)
            if trail is not None:
                trails[leader] = trail
            found.append(demand)
    found = _with_ingresses(snapshot, found)
    overloaded = tuple(d for d in found if d.is_known and d.demand_blocks > config.drop_above * d.capacity_blocks)
    by_member = {member: demand for demand in found for member in demand.group.members}
    return MemoryDemand(instances=instances, by_member=by_member, overloaded=overloaded), DemandHistory(trails=trails)


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


def _longer(trail: Trail | None, demand: GroupDemand, now_s: float) -> Trail:
    """The trail with this look, without those that are too old."""
    look = (now_s, demand.resident_blocks + demand.queued_blocks)
    if trail is None:
        return Trail(demand.group, (look,))
    if now_s - trail.looks[-1][0] < MIN_GAP_S:
        return trail
    return Trail(demand.group, (*(old for old in trail.looks if now_s - old[0] <= WINDOW_S), look))


def _with_ingresses(snapshot: ClusterSnapshot, found: list[GroupDemand]) -> list[GroupDemand]:
    """Adds the requests that wait at ingresses: as long as others are, spread as capacity is.

    Where one waits that is too long for any route, more memory on the same instances is not what that ingress needs.
    """
    num_waiting = sum(d.num_waiting for d in snapshot.demands if not d.longest_waiting_tokens)
    known = [d for d in found if d.is_known]
    total_blocks = sum(d.capacity_blocks for d in known)
    if not num_waiting or not total_blocks:
        return found
    num_requests = sum(d.num_running + d.num_waiting for d in known)
    each_blocks = sum(d.resident_blocks + d.queued_blocks for d in known) / max(1, num_requests)
    share = num_waiting * max(1.0, each_blocks) / total_blocks
    return [
        replace(d, queued_blocks=d.queued_blocks + round(share * d.capacity_blocks)) if d.is_known else d for d in found
    ]
