"""Which replicated parameters to drop, so that requests find memory (KunServe Algorithm 1).

Instances that hold the same parameters become the stages of one pipeline; each keeps its own layers, and the memory of
the others holds KV. The more stages, the more is free and the slower is each request: so the smallest groups are
merged first, and only as far as memory is short.

The paper's priority queue by group size has one bucket for each power of two here, since a pipeline is an aligned run
of ranks of such a length: two halves merge into it. So it is one pass over what can be formed, the narrowest first.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from pengserve.planners.load import lane_capacity
from pengserve.planners.overload import GroupDemand, MemoryDemand
from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import ClusterSnapshot

_SHOWN_GROUPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline to form, and the memory of its members together, in blocks of a dp lane."""

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


@dataclass(slots=True, kw_only=True)
class _Search:
    """One call's working state: the pipelines that are planned so far, by member."""

    demand: MemoryDemand
    config: DropConfig
    claimed: Collection[InstanceId]
    can_grow: bool
    planned: dict[InstanceId, Pipeline] = field(default_factory=dict)

    def may_merge(self, part: GroupDemand) -> bool:
        """Whether a group of the layout may become a part of a pipeline."""
        kind = part.group.kind
        is_fit = kind is GroupKind.DP or (kind is GroupKind.PP and self.can_grow)
        return is_fit and part.is_known and not part.num_paused and self.is_free(part.group.members)

    def is_free(self, members: Iterable[InstanceId]) -> bool:
        """Whether nobody else has claimed any of `members`."""
        return not self.claimed or not any(member in self.claimed for member in members)

    def try_merge(self, group: Group) -> None:
        """Plans `group` in place of its parts, where one of them is short and it frees memory."""
        by_member, planned, members = self.demand.by_member, self.planned, group.members
        demand_blocks = held_blocks = planned_blocks = start = 0
        is_short = False
        while start < len(members):
            part, pipeline = by_member.get(members[start]), planned.get(members[start])
            if pipeline is not None:
                width = len(pipeline.group.members)
                if pipeline.group.members != members[start : start + width]:
                    return
                demand_blocks += pipeline.demand_blocks
                held_blocks += pipeline.held_blocks
                planned_blocks += pipeline.capacity_blocks
                is_short |= pipeline.demand_blocks > self.config.target * pipeline.capacity_blocks
            elif part is not None and self.may_merge(part):
                width = len(part.group.members)
                if part.group.members != members[start : start + width]:
                    return
                demand_blocks += part.demand_blocks
                held_blocks += part.capacity_blocks
                planned_blocks += part.capacity_blocks
                is_short |= part.demand_blocks > self.config.drop_above * part.capacity_blocks
            else:
                return
            start += width
        if not is_short:
            return
        capacity_blocks = pipeline_blocks(self.demand, group)
        if capacity_blocks > planned_blocks:
            merged = Pipeline(
                group=group, demand_blocks=demand_blocks, held_blocks=held_blocks, capacity_blocks=capacity_blocks
            )
            planned.update(dict.fromkeys(members, merged))

    def is_short(self, part: GroupDemand) -> bool:
        """Whether an overloaded group of the layout is still overloaded after all that is planned."""
        pipeline = self.planned.get(part.group.members[0])
        return pipeline is None or pipeline.demand_blocks > self.config.drop_above * pipeline.capacity_blocks


def plan_drop(
    snapshot: ClusterSnapshot,
    demand: MemoryDemand,
    config: DropConfig,
    *,
    claimed: Collection[InstanceId] = (),
    can_grow: bool = False,
) -> Verdict:
    """The pipelines that make room for the overloaded groups.

    An overloaded group merges with its buddy, and the two with theirs, until the demand is at most the share `target`
    of what there is, or `max_stages` are reached. Only groups of the layout merge that are wholly READY, known, and not
    `claimed`; tp groups never do, and pipelines that stand do where the mechanism `can_grow` them. Where even the
    widest pipeline is not enough it is planned all the same: it runs more at once than its members can alone.
    """
    if not demand.overloaded:
        return Verdict(why="no group is short of memory")
    search = _Search(demand=demand, config=config, claimed=claimed, can_grow=can_grow)
    needy = {member for part in demand.overloaded for member in part.group.members}
    for group in _formable(snapshot, config.max_stages, needy):
        search.try_merge(group)
    short = tuple(part.group for part in demand.overloaded if search.is_short(part))
    pipelines = {pipeline.group.members[0]: pipeline for pipeline in search.planned.values()}
    if not pipelines:
        return Verdict(short=short, why=f"{_names(short)} are short of memory, and no pipeline can be formed of them")
    ranked = sorted(pipelines.values(), key=lambda p: (-p.share, p.group.members))
    why = f"{_names(short)} stay short of memory" if short else ""
    return Verdict(plan=DropPlan(pipelines=tuple(ranked)), short=short, why=why)


def pipeline_blocks(demand: MemoryDemand, group: Group) -> int:
    """Blocks that `group` would hold, which is what its narrowest member can; 0 where one has no such lane."""
    lanes = [lane_capacity(demand.instances.get(member), group.shape) for member in group.members]
    return min(lane.num_blocks if lane is not None else 0 for lane in lanes)


def _formable(snapshot: ClusterSnapshot, max_stages: int, needy: set[InstanceId]) -> list[Group]:
    """Pipelines of `needy` and others that could run now, the narrowest first."""
    possible = [g for g in snapshot.groups if g.kind is GroupKind.PP and not needy.isdisjoint(g.members)]
    return sorted((g for g in possible if len(g.members) <= max_stages), key=lambda g: (len(g.members), g.members))


def _names(groups: Iterable[Group]) -> str:
    """At most a few names."""
    names = [str(group) for group in groups]
    more = [f"{len(names) - _SHOWN_GROUPS} more"] if len(names) > _SHOWN_GROUPS else []
    return ", ".join(names[:_SHOWN_GROUPS] + more)
