"""Which replicated parameters to drop, so that requests find memory (KunServe Algorithm 1).

Instances that hold the same parameters become the stages of one pipeline; each keeps its own layers, and the memory of
the others holds KV. The more stages, the more is free and the slower is each request: so the smallest groups are
merged first, and only as far as memory is short.

The paper's priority queue by group size has one bucket for each power of two here, since a pipeline is an aligned run
of ranks of such a length: two halves merge into it. So it is one pass over what can be formed, the narrowest first.

For 1,000 instances a plan takes about a millisecond where a tenth of them is short, and four where all are and none
gets along with two stages (`tests/planners/test_drop.py` prints it; two shared cores).
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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


class _Part(NamedTuple):
    """A group of the layout, or a pipeline that is planned in place of some. A tuple: there may be a thousand."""

    group: Group
    demand_blocks: int
    held_blocks: int  # now
    capacity_blocks: int  # what it will hold; of a group of the layout, what it holds
    is_short: bool  # and should go on merging


@dataclass(slots=True, kw_only=True)
class _Search:
    """One call's working state: the parts by member, as far as they were looked at."""

    demand: MemoryDemand
    config: DropConfig
    claimed: Collection[InstanceId]
    can_grow: bool
    parts: dict[InstanceId, _Part] = field(default_factory=dict)

    def try_merge(self, group: Group) -> None:
        """Plans `group` in place of its parts, where one of them is short and it frees memory."""
        members, start, is_short = group.members, 0, False
        demand_blocks = held_blocks = parts_blocks = 0
        while start < len(members):
            part = self.parts.get(members[start]) or self._of_layout(members[start])
            stop = start + len(part.group.members) if part is not None else start
            if part is None or part.group.members != members[start:stop]:
                return
            demand_blocks += part.demand_blocks
            held_blocks += part.held_blocks
            parts_blocks += part.capacity_blocks
            is_short = is_short or part.is_short
            start = stop
        if not is_short:
            return
        capacity_blocks = pipeline_blocks(self.demand, group)
        if capacity_blocks > parts_blocks:
            is_short = demand_blocks > self.config.target * capacity_blocks
            merged = _Part(group, demand_blocks, held_blocks, capacity_blocks, is_short)
            for member in members:
                self.parts[member] = merged

    def _of_layout(self, member: InstanceId) -> _Part | None:
        """The group of the layout that `member` is in; None where it must not become a part of a pipeline."""
        known = self.demand.by_member.get(member)
        if known is None or not known.is_known or known.num_paused:
            return None
        group, blocks = known.group, known.demand_blocks
        is_fit = group.kind is GroupKind.DP or (group.kind is GroupKind.PP and self.can_grow)
        if not is_fit or (self.claimed and any(m in self.claimed for m in group.members)):
            return None
        is_short = blocks > self.config.drop_above * known.capacity_blocks
        part = _Part(group, blocks, known.capacity_blocks, known.capacity_blocks, is_short)
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


def _names(groups: Sequence[Group]) -> str:
    """At most a few names."""
    more = [f"{len(groups) - _SHOWN_GROUPS} more"] if len(groups) > _SHOWN_GROUPS else []
    return ", ".join([str(group) for group in groups[:_SHOWN_GROUPS]] + more)
