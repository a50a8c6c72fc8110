"""When dropped parameters come back (KunServe section 4.4): each pipeline costs speed, so none stays for longer than
memory is short.

What keeps the layout from flapping: a pipeline stands for `min_dwell_s`; its demand has been below `restore_below` of
what its members hold alone for `quiet_s`; and its requests fit into the members so, whatever their lengths, that no
member is overloaded again.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from pengserve.planners.load import fits_alone, lane_capacity
from pengserve.planners.overload import GroupDemand, MemoryDemand
from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import ClusterSnapshot, KvCapacity
from pengserve.planners.types.units import format_bytes

GAP_S = 5.0  # without a look


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """A pipeline to end, and what that moves."""

    group: Group
    weight_bytes: int  # parameters that its members have dropped
    kv_bytes: int  # KV that running requests need where they go on
    why: str

    @property
    def moved_bytes(self) -> int:
        """All that goes from member to member."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreHistory:
    """What is remembered from look to look. A value: a call returns the next one. Times are snapshot times."""

    since_s: Mapping[Group, float] = field(default_factory=dict)  # pipelines of the layout, and since when
    low_since_s: Mapping[Group, float] = field(default_factory=dict)  # those that memory does not need, and since when
    seen_s: float | None = None  # the newest look


def plan_restore(
    snapshot: ClusterSnapshot,
    demand: MemoryDemand,
    config: DropConfig,
    history: RestoreHistory,
    *,
    claimed: Collection[InstanceId] = (),
) -> tuple[RestorePlan | None, RestoreHistory]:
    """The pipeline that is cheapest to end, or None where none should; and what to remember for the next call.

    Cheapest is what moves the fewest bytes; ties go to the lowest rank. None ends while memory is short anywhere, while
    a request waits or runs that is too long for one of its members, and none with a member that is `claimed`.
    """
    pipelines = [g for g in snapshot.layout.groups if g.kind is GroupKind.PP]
    now_s, seen_s = snapshot.time_s, history.seen_s
    since = snapshot.layout_since_s or now_s
    # After a gap nobody knows what was in between; looks may be further apart than `quiet_s`.
    low_before = {} if seen_s is None or now_s - seen_s > max(GAP_S, config.quiet_s) else history.low_since_s
    quiet = [g for g in pipelines if _is_quiet(demand, g, config, g in low_before)]
    history = RestoreHistory(
        since_s={g: history.since_s.get(g, since) for g in pipelines},
        low_since_s={g: low_before.get(g, now_s) for g in quiet},
        seen_s=now_s,
    )
    if demand.overloaded:
        return None, history
    longest_waiting = max((d.longest_waiting_tokens for d in snapshot.demands), default=0)
    able = [
        _plan(demand, g, now_s - history.low_since_s[g])
        for g in quiet
        if now_s - history.low_since_s[g] >= config.quiet_s
        and now_s - history.since_s[g] >= config.min_dwell_s
        and not any(member in claimed for member in g.members)
        and can_restore(demand, g, config.drop_above, longest_waiting)
    ]
    return min(able, key=lambda plan: (plan.moved_bytes, plan.group.members), default=None), history


def can_restore(demand: MemoryDemand, group: Group, fill: float, longest_waiting_tokens: int = 0) -> bool:
    """Whether what `group` runs and queues surely fits into its members alone, each filled to `fill` at most.

    A waiting request that the group alone can hold keeps it.
    """
    here, leader = demand.by_member[group.leader], demand.instances[group.leader]
    dp_tokens = min((lane.max_model_len for lane in _alone(demand, group)), default=0)
    wide = lane_capacity(leader, group.shape)
    is_kept = wide is not None and dp_tokens < longest_waiting_tokens <= wide.max_model_len
    return (
        not is_kept
        and 0 < dp_tokens >= leader.stats.longest_tokens
        and fits_alone(group, demand.instances, here.demand_blocks, fill)
    )


def _is_quiet(demand: MemoryDemand, group: Group, config: DropConfig, was_quiet: bool) -> bool:
    """Whether its members hold the demand with ease. Where stats are stale, what was known stands."""
    here = demand.by_member.get(group.leader)
    if here is None:
        return False
    if not here.is_known:
        return was_quiet
    return here.demand_blocks < config.restore_below * sum(lane.num_blocks for lane in _alone(demand, group))


def _plan(demand: MemoryDemand, group: Group, low_s: float) -> RestorePlan:
    lanes, here = _alone(demand, group), demand.by_member[group.leader]
    share = here.demand_blocks / max(1, sum(lane.num_blocks for lane in lanes))
    weight_bytes, kv_bytes = moved_bytes(lanes, here)
    why = f"memory: demand {share:.2f} of what its members hold alone for {low_s:.1f} s"
    why += f", {format_bytes(weight_bytes)} of parameters come back"
    return RestorePlan(group=group, weight_bytes=weight_bytes, kv_bytes=kv_bytes, why=why)


def moved_bytes(lanes: Collection[KvCapacity], here: GroupDemand) -> tuple[int, int]:
    """Bytes of parameters and of KV that a restore moves, given the members' dp lanes.

    Of s stages each has dropped all but 1/s of the parameters, and has 1/s of the KV of the requests that go on there.
    """
    num_stages = max(1, len(lanes))
    weight_bytes = sum(lane.weight_bytes for lane in lanes) * (num_stages - 1) // num_stages
    bytes_per_block = max((lane.bytes_per_block for lane in lanes), default=0)
    return weight_bytes, here.resident_blocks * bytes_per_block * (num_stages - 1) // num_stages


def _alone(demand: MemoryDemand, group: Group) -> list[KvCapacity]:
    """The dp lanes of the members; empty where one has none."""
    lanes = [lane_capacity(demand.instances.get(member), GroupKind.DP) for member in group.members]
    return [lane for lane in lanes if lane is not None] if None not in lanes else []
