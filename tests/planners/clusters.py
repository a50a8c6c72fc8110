"""Snapshots to plan on, and a cluster in virtual time that follows the plans."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pengserve.planners.check import check_switch
from pengserve.planners.groups import complete, groups_for, pipelines_for
from pengserve.planners.merge.history import LoadHistory
from pengserve.planners.merge.propose import propose
from pengserve.planners.types.config import MergeConfig
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind, Layout, degree_of
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import (
    ClusterSnapshot,
    Demand,
    InstanceSnapshot,
    InstanceState,
    InstanceStats,
    KvCapacity,
    LaneInfo,
)
from tests.support.layouts import check_layout

BLOCK_SIZE = 32
NUM_BLOCKS = 64  # of one instance
WEIGHT_BLOCKS = 32  # as many would fit where its parameters are
BLOCK_BYTES = 1 << 20
DP_TOKENS = BLOCK_SIZE * NUM_BLOCKS  # most tokens of a request on one instance
SLOTS = 32
T0_S = 1000.0


def plan_switch(
    seen: ClusterSnapshot, config: MergeConfig, history: LoadHistory
) -> tuple[SwitchPlan | None, LoadHistory]:
    """The merge planner's next switch, where nothing else is asked; and what to remember."""
    proposal = propose(seen, config, history)
    return proposal.plan, proposal.followed


def capacity(degree: int = 1, slots: int = SLOTS) -> KvCapacity:
    """A lane of `degree`: as many blocks, each of `degree` times the tokens."""
    return KvCapacity(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE * degree,
        bytes_per_block=BLOCK_BYTES,
        max_model_len=DP_TOKENS * degree,
        max_num_seqs=slots,
        weight_bytes=WEIGHT_BLOCKS * BLOCK_BYTES,
    )


def pipeline_capacity(stages: int) -> KvCapacity:
    """A pipeline of `stages`: all blocks of its members, and those where all copies of the parameters but one were."""
    num_blocks = stages * NUM_BLOCKS + (stages - 1) * WEIGHT_BLOCKS
    return replace(capacity(), num_blocks=num_blocks, max_model_len=num_blocks * BLOCK_SIZE)


def stats(shape: str = "dp", requests: int = 0, waiting: int = 0, blocks: int = 0, **more: int) -> InstanceStats:
    """Load of an instance that runs `shape`; `requests` run."""
    num_blocks = pipeline_capacity(degree_of(shape)).num_blocks if shape.startswith("pp") else NUM_BLOCKS
    return InstanceStats(
        shape=shape,
        num_running=requests,
        num_waiting=waiting,
        kv_blocks_used=blocks,
        kv_blocks_total=num_blocks,
        **more,
    )


def instance(
    instance_id: int,
    load: InstanceStats | None = None,
    degrees: Sequence[int] = (2, 4),
    state: InstanceState = InstanceState.READY,
    max_stages: int = 1,
) -> InstanceSnapshot:
    lanes = [LaneInfo(shape="dp", capacity=capacity())]
    lanes += [LaneInfo(shape=f"tp{degree}", capacity=capacity(degree)) for degree in degrees]
    lanes += [LaneInfo(shape=f"pp{s}", capacity=pipeline_capacity(s)) for s in (2, 4, 8) if s <= max_stages]
    return InstanceSnapshot(
        key=InstanceKey(instance_id=InstanceId(instance_id), incarnation=1),
        state=state,
        capacity=capacity(),
        stats=load or stats(),
        lanes=tuple(lanes),
    )


def snapshot(
    num_instances: int,
    layout: str | Sequence[Group] = "",
    loads: Mapping[int, InstanceStats] | None = None,
    *,
    demands: Sequence[Demand] = (),
    time_s: float = T0_S,
    since_s: float = T0_S - 100,
    degrees: Sequence[int] = (2, 4),
    epoch: int = 7,
    without: Sequence[InstanceId] = (),
    max_stages: int = 1,
) -> ClusterSnapshot:
    """`layout` names the tp and pp groups; instances without stats in `loads` are idle in their shape."""
    ranks = tuple(map(InstanceId, range(num_instances)))
    named = [Group.parse(word) for word in layout.split()] if isinstance(layout, str) else list(layout)
    groups = complete(named, ranks)
    shape = {member: group.shape for group in groups for member in group.members}
    given = loads or {}
    return ClusterSnapshot(
        app="test",
        time_s=time_s,
        layout=Layout(epoch=Epoch(epoch), groups=groups),
        instances=tuple(
            instance(
                i,
                given.get(i, stats(shape[i])),
                degrees,
                InstanceState.DEAD if i in without else InstanceState.READY,
                max_stages,
            )
            for i in ranks
        ),
        ranks=ranks,
        groups=tuple(
            g
            for g in (*groups_for(ranks, dict.fromkeys(ranks, "n"), degrees), *pipelines_for(ranks, ranks, max_stages))
            if not set(g.members) & set(without)
        ),
        demands=tuple(demands),
        layout_since_s=since_s,
    )


@dataclass
class VirtualCluster:
    """Requests spread evenly over routes, stats are true, and a plan is carried out before the next tick.

    `requests(t)` is how many are in flight `t` seconds after the start, and `demand(t)` what ingresses ask for.
    """

    num_instances: int
    requests: Callable[[float], int]
    config: MergeConfig = field(default_factory=MergeConfig)
    demand: Callable[[float], Demand] = lambda _: Demand()
    tick_s: float = 0.5
    slots: int = SLOTS
    groups: tuple[Group, ...] = ()
    history: LoadHistory = field(default_factory=LoadHistory)
    switches: list[tuple[float, SwitchPlan]] = field(default_factory=list)
    since_s: float = T0_S
    shapes: list[tuple[float, tuple[Group, ...]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = complete(self.groups, self._ranks())

    def _ranks(self) -> tuple[InstanceId, ...]:
        return tuple(map(InstanceId, range(self.num_instances)))

    def look(self, t_s: float) -> ClusterSnapshot:
        """What a controller sees at `t_s` seconds after the start."""
        loads, left = {}, self.requests(t_s)
        for i, group in enumerate(self.groups):
            share = left // (len(self.groups) - i)
            left -= share
            running = min(share, SLOTS)
            blocks = min(NUM_BLOCKS, -(-running // group.degree))
            loads[group.leader] = stats(group.shape, running, share - running, blocks)
            for member in group.members[1:]:
                loads[member] = stats(group.shape)
        return snapshot(
            self.num_instances,
            self.groups,
            loads,
            demands=[self.demand(t_s)],
            time_s=T0_S + t_s,
            since_s=self.since_s,
            epoch=len(self.switches),
        )

    def run(self, seconds: float) -> "VirtualCluster":
        """Ticks for `seconds`; every plan is checked and carried out."""
        for tick in range(int(seconds / self.tick_s)):
            t_s = tick * self.tick_s
            seen = self.look(t_s)
            plan, self.history = plan_switch(seen, self.config, self.history)
            if plan is not None:
                assert check_switch(plan, seen) == ()
                self.switches.append((t_s, plan))
                self.since_s = seen.time_s
                rest = [g for g in self.groups if not set(g.members) & set(plan.group.members)]
                self.groups = complete([*rest, *((plan.group,) if plan.is_merge else plan.parts)], self._ranks())
                assert check_layout(Layout(epoch=Epoch(0), groups=self.groups), self._ranks()) == ()
            self.shapes.append((t_s, self.groups))
        return self

    def shape_at(self, t_s: float) -> str:
        """Tp groups just after the tick at `t_s`, e.g. "tp2@(0,1)"; empty where all are alone."""
        groups = next(groups for at_s, groups in reversed(self.shapes) if at_s <= t_s)
        return " ".join(str(g) for g in groups if g.kind is GroupKind.TP)
