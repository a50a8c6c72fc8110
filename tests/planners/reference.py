"""The planners of memory as they read best: group by group, value by value. Those that count in columns must agree."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from pengserve.planners.demand_trend import MIN_GAP_S, MIN_LOOKS, WINDOW_S, DemandTrend
from pengserve.planners.drop import DropPlan, Pipeline, Verdict, _names
from pengserve.planners.load import lane_capacity, part_capacity
from pengserve.planners.overload import GroupDemand, group_demand
from pengserve.planners.restore import Way
from pengserve.planners.stages import nests
from pengserve.planners.steps import halves_of
from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceSnapshot, InstanceState


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryDemand:
    instances: Mapping[InstanceId, InstanceSnapshot]
    by_member: Mapping[InstanceId, GroupDemand]
    overloaded: tuple[GroupDemand, ...] = ()


def blocks_per_s(trend: DemandTrend) -> float:
    """The median of the slopes between any two looks (Theil-Sen); 0 where it fell, or while there are too few.

    One arrival is one step: it changes fewer than half of the slopes, and none that counts.
    """
    if len(trend.looks) < MIN_LOOKS or trend.looks[-1][1] <= trend.looks[0][1]:
        return 0.0
    slopes = sorted((b - a) / (later - at) for (at, a), (later, b) in combinations(trend.looks, 2))
    return max(0.0, slopes[(len(slopes) - 1) // 2])


def predict_demand(
    snapshot: ClusterSnapshot, config: DropConfig, history: Mapping[InstanceId, DemandTrend]
) -> tuple[MemoryDemand, Mapping[InstanceId, DemandTrend]]:
    """The demand of each group whose members are all READY, and what to remember for the next call.

    Where a leader's stats are of another shape, its group's demand is unknown: it is neither overloaded nor quiet.
    """
    instances = {i.key.instance_id: i for i in snapshot.instances if i.state is InstanceState.READY}
    now_s, trends = snapshot.time_s, {}
    found: list[GroupDemand] = []
    for group in snapshot.layout.groups:
        if all(member in instances for member in group.members):
            leader = group.members[0]
            trend = history.get(leader)
            if trend is not None and trend.group is not group and trend.group != group:
                trend = None
            demand = group_demand(group, instances)
            if demand.is_known:
                trend = _longer(trend, demand, now_s)
                growth_blocks = round(blocks_per_s(trend) * config.horizon_s)
                if growth_blocks:
                    demand = demand._replace(growth_blocks=growth_blocks)
            if trend is not None:
                trends[leader] = trend
            found.append(demand)
    found = _with_ingresses(snapshot, found)
    overloaded = tuple(d for d in found if d.is_known and d.demand_blocks > config.drop_above * d.capacity_blocks)
    by_member = {member: demand for demand in found for member in demand.group.members}
    return MemoryDemand(instances=instances, by_member=by_member, overloaded=overloaded), trends


def _longer(trend: DemandTrend | None, demand: GroupDemand, now_s: float) -> DemandTrend:
    """The trend with this look, without those that are too old."""
    look = (now_s, demand.resident_blocks + demand.queued_blocks)
    if trend is None:
        return DemandTrend(demand.group, (look,))
    if now_s - trend.looks[-1][0] < MIN_GAP_S:
        return trend
    return DemandTrend(demand.group, (*(old for old in trend.looks if now_s - old[0] <= WINDOW_S), look))


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
        d._replace(queued_blocks=d.queued_blocks + round(share * d.capacity_blocks)) if d.is_known else d for d in found
    ]


class _Part(NamedTuple):
    """A group of the layout, or a pipeline that is planned in place of some. A tuple: there may be a thousand."""

    group: Group
    demand_blocks: int
    held_blocks: int  # now
    capacity_blocks: int  # what it will hold; of a group of the layout, what it holds
    is_short: bool  # and should go on merging
    present_blocks: int  # of the demand, those that are not predicted
    has_room: bool = False  # a pipeline of the layout that is not short


@dataclass(slots=True, kw_only=True)
class _Search:
    """One call's working state: the parts by member, as far as they were looked at."""

    demand: MemoryDemand
    config: DropConfig
    claimed: Collection[InstanceId]
    parts: dict[InstanceId, _Part] = field(default_factory=dict)

    def try_merge(self, group: Group) -> None:
        """Plans `group` in place of its parts, where memory is short in one of them and it frees some."""
        parts = self._parts(group.members)
        if not nests([len(part.group.members) for part in parts]) or not self._is_due(parts):
            return
        demand_blocks = sum(part.demand_blocks for part in parts)
        capacity_blocks = pipeline_blocks(self.demand, group)
        if capacity_blocks > sum(part.capacity_blocks for part in parts):
            merged = _Part(
                group,
                demand_blocks,
                sum(part.held_blocks for part in parts),
                capacity_blocks,
                demand_blocks > self.config.target * capacity_blocks,
                sum(part.present_blocks for part in parts),
            )
            for member in group.members:
                self.parts[member] = merged

    def _parts(self, members: tuple[InstanceId, ...]) -> list[_Part]:
        """The whole parts that `members` are, one after the other; none where they are not."""
        found: list[_Part] = []
        start = 0
        while start < len(members):
            part = self.parts.get(members[start]) or self._of_layout(members[start])
            stop = start + len(part.group.members) if part is not None else start
            if part is None or part.group.members != members[start:stop]:
                return []
            found.append(part)
            start = stop
        return found

    def _is_due(self, parts: list[_Part]) -> bool:
        """Whether memory is short in one of `parts`; where it would draw in a pipeline that has room, now."""
        is_full = any(part.present_blocks > self.config.drop_above * part.capacity_blocks for part in parts)
        return any(part.is_short for part in parts) and (is_full or not any(part.has_room for part in parts))

    def _of_layout(self, member: InstanceId) -> _Part | None:
        """The group of the layout that `member` is in; None where it must not become a part of a pipeline."""
        known = self.demand.by_member.get(member)
        if known is None or not known.is_known or known.num_paused:
            return None
        group, blocks = known.group, known.demand_blocks
        if group.kind is GroupKind.TP or (self.claimed and any(m in self.claimed for m in group.members)):
            return None
        is_short = blocks > self.config.drop_above * known.capacity_blocks
        held_blocks, present_blocks = known.capacity_blocks, blocks - known.growth_blocks
        has_room = group.kind is GroupKind.PP and not is_short
        part = _Part(group, blocks, held_blocks, held_blocks, is_short, present_blocks, has_room)
        for m in group.members:
            self.parts[m] = part
        return part

    def pipelines(self) -> list[Pipeline]:
        """What is planned, the one whose members are shortest of memory first."""
        planned = {
            part.group.members[0]: part for part in self.parts.values() if part.capacity_blocks > part.held_blocks
        }
        found = [
            Pipeline(
                group=p.group,
                demand_blocks=p.demand_blocks,
                held_blocks=p.held_blocks,
                capacity_blocks=p.capacity_blocks,
            )
            for p in planned.values()
        ]
        return sorted(found, key=lambda pipeline: (-pipeline.share, pipeline.group.members))

    def is_short(self, overloaded: GroupDemand) -> bool:
        """Whether an overloaded group of the layout is still overloaded after all that is planned."""
        part = self.parts.get(overloaded.group.members[0])
        return part is None or part.demand_blocks > self.config.drop_above * part.capacity_blocks


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
    now, not in a moment. Where even the widest pipeline is not enough it is planned all the same: it runs more at once
    than its members can alone.
    """
    if not demand.overloaded:
        return Verdict(why="no group is short of memory")
    search = _Search(demand=demand, config=config, claimed=claimed)
    needy = {member for part in demand.overloaded for member in part.group.members}
    for group in _formable(snapshot, config.max_stages, needy):
        search.try_merge(group)
    short = tuple(part.group for part in demand.overloaded if search.is_short(part))
    pipelines = search.pipelines()
    if not pipelines:
        return Verdict(short=short, why=f"{_names(short)} are short of memory, and no pipeline can be formed of them")
    why = f"{_names(short)} stay short of memory" if short else ""
    return Verdict(plan=DropPlan(pipelines=tuple(pipelines)), short=short, why=why)


def pipeline_blocks(demand: MemoryDemand, group: Group) -> int:
    """Blocks that `group` would hold, which is what its narrowest member can; 0 where one has no such lane."""
    instances, shape = demand.instances, group.shape
    lanes = [lane_capacity(instances.get(member), shape) for member in group.members]
    return min(lane.num_blocks if lane is not None else 0 for lane in lanes)


def _formable(snapshot: ClusterSnapshot, max_stages: int, needy: set[InstanceId]) -> list[Group]:
    """Pipelines of `needy` and others that could run now, the narrowest first."""
    possible = [g for g in snapshot.groups if g.kind is GroupKind.PP and not needy.isdisjoint(g.members)]
    return sorted((g for g in possible if len(g.members) <= max_stages), key=lambda g: (len(g.members), g.members))


def low_ways(seen: ClusterSnapshot, demand: MemoryDemand, config: DropConfig, before: Collection[Way]) -> set[Way]:
    """What each pipeline of the layout could end in that holds its demand with ease.

    Where stats are stale, what was known stands.
    """
    found: set[Way] = set()
    for group in (g for g in seen.layout.groups if g.kind is GroupKind.PP):
        here, halves = demand.by_member.get(group.leader), halves_of(group)
        ways = [Way(group, alone(group.members))]
        if halves and all(half in seen.groups for half in halves):
            ways.append(Way(group, halves))
        for way in ways if here is not None else ():
            lanes = [part_capacity(demand.instances, part) for part in way.parts]
            room_blocks = sum(lane.num_blocks for lane in lanes if lane is not None) if None not in lanes else 0
            if here.demand_blocks < config.restore_below * room_blocks if here.is_known else way in before:
                found.add(way)
    return found
