"""When dropped parameters come back (KunServe section 4.4): each pipeline costs speed, so none stays for longer than
memory is short.

A pipeline ends in its members alone, or where these would be too small, in its two halves.

What keeps the layout from flapping: a pipeline stands for `min_dwell_s`; its demand has been below `restore_below` of
what it would end in for `quiet_s`; and its requests fit in there, however long each of them is, so
that no memory is short again.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pengserve.planners.columns import Alike, Ints, group_table
from pengserve.planners.load import fits_alone, formable_groups, lane_capacity, part_capacity
from pengserve.planners.overload import GroupDemand, MemoryDemand
from pengserve.planners.steps import halves_of
from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind, alone
from pengserve.planners.types.snapshot import ClusterSnapshot, KvCapacity
from pengserve.planners.types.units import format_bytes

GAP_S = 5.0  # without a look


class Way(NamedTuple):
    """A pipeline, and what it could end in."""

    group: Group
    parts: tuple[Group, ...]

    @property
    def is_alone(self) -> bool:
        """Whether all parameters come back."""
        return all(part.kind is GroupKind.DP for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """A pipeline to end, and what that moves."""

    group: Group
    weight_bytes: int  # parameters that its members have dropped
    kv_bytes: int  # KV that running requests need where they go on
    why: str
    parts: tuple[Group, ...] = ()  # that it ends in; empty: its members alone

    @property
    def moved_bytes(self) -> int:
        """All that goes from member to member."""
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreHistory:
    """What is remembered from look to look. A value: a call returns the next one. Times are snapshot times."""

    since_s: Mapping[Group, float] = field(default_factory=dict)  # pipelines of the layout, and since when
    low_since_s: Mapping[Way, float] = field(default_factory=dict)  # those that memory does not need, and since when
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
    pipelines = group_table(snapshot.layout.groups).of_kind[GroupKind.PP]
    now_s, seen_s = snapshot.time_s, history.seen_s
    since = snapshot.layout_since_s or now_s
    # Nothing was measured during a gap, so quiet times begin anew. Looks may be further apart than `quiet_s`.
    is_gap = seen_s is None or now_s - seen_s > max(GAP_S, config.quiet_s)
    low_before = {} if is_gap else history.low_since_s
    low_since_s = {
        way: low_before.get(way, now_s)
        for way, is_known in _quiet_ways(demand, config, snapshot)
        if is_known or way in low_before  # where stats are stale, what was known stands
    }
    history = RestoreHistory(
        since_s={g: history.since_s.get(g, since) for g in pipelines}, low_since_s=low_since_s, seen_s=now_s
    )
    if demand.is_short:
        return None, history
    longest_waiting = max((d.longest_waiting_tokens for d in snapshot.demands), default=0)
    able = []
    for group in dict.fromkeys(way.group for way in low_since_s):
        if now_s - history.since_s[group] < config.min_dwell_s or any(m in claimed for m in group.members):
            continue
        for way in ways(group, snapshot.groups):
            low_s = now_s - low_since_s.get(way, now_s + 1)
            if low_s >= config.quiet_s and can_restore(demand, way, config.drop_above, longest_waiting):
                able.append(_plan(demand, way, low_s))
                break
            if 0 <= low_s < config.quiet_s:
                break  # soon it may be due, and it leads further than the next way
    return min(able, key=lambda plan: (plan.moved_bytes, plan.group.members), default=None), history


def ways(group: Group, groups: tuple[Group, ...]) -> tuple[Way, ...]:
    """What a pipeline can end in, the way that brings most parameters back first; `groups` could be formed now."""
    whole, halved = _all_ways(group)
    formable = formable_groups(groups)
    return (whole, halved) if halved and all(half in formable for half in halved.parts) else (whole,)


@lru_cache(maxsize=1 << 12)
def _all_ways(group: Group) -> tuple[Way, Way | None]:
    """As its members alone, and as its halves if it has any. Kept, since a pipeline stands for many looks."""
    halves = halves_of(group)
    return Way(group, alone(group.members)), Way(group, halves) if halves else None


def can_restore(demand: MemoryDemand, way: Way, fill: float, longest_waiting_tokens: int = 0) -> bool:
    """Whether what a pipeline runs and queues surely fits into what it ends in, each filled to `fill` at most.

    A waiting request that the pipeline alone can hold keeps it.
    """
    group = way.group
    here, leader = demand.by_member[group.leader], demand.instances[group.leader]
    most_tokens = min((lane.max_model_len for lane in _lanes(demand, way)), default=0)
    wide = lane_capacity(leader, group.shape)
    is_kept = wide is not None and most_tokens < longest_waiting_tokens <= wide.max_model_len
    return (
        not is_kept
        and 0 < most_tokens >= leader.stats.longest_tokens
        and fits_alone(group, demand.instances, here.demand_blocks, fill, way.parts)
    )


def _quiet_ways(demand: MemoryDemand, config: DropConfig, snapshot: ClusterSnapshot) -> Iterator[tuple[Way, bool]]:
    """The ways to end in what holds the demand with ease, and whether the demand is known; all ways where it is not."""
    columns = demand.by_member.columns
    for alike in demand.by_member.table.wide:
        if alike.kind is not GroupKind.PP:
            continue
        is_known, blocks = columns.is_known[alike.at], columns.demand_blocks[alike.at]
        in_members, in_halves = _room_blocks(demand, alike)
        is_low = blocks < config.restore_below * in_members, blocks < config.restore_below * in_halves
        for i in np.flatnonzero(~is_known | is_low[0] | is_low[1]).tolist():
            for way in ways(demand.by_member.table.groups[alike.at[i]], snapshot.groups):
                if not is_known[i] or is_low[0 if way.is_alone else 1][i]:
                    yield way, bool(is_known[i])


def _room_blocks(demand: MemoryDemand, alike: Alike) -> tuple[Ints, Ints]:
    """Blocks that the members of each group have, alone and as halves; 0 where one cannot run so."""
    members, degree = alike.members, alike.members.shape[1]
    lanes = demand.instances.lanes(GroupKind.DP)
    alone_blocks: Ints = lanes["num_blocks"][members].sum(axis=1) * lanes.exists[members].all(axis=1)
    middle, rest = divmod(degree, 2)
    if rest or middle < 2:
        return alone_blocks, np.zeros_like(alone_blocks)
    lanes = demand.instances.lanes(f"{GroupKind.PP}{middle}")
    halves = lanes["num_blocks"][members].reshape(-1, 2, middle).min(axis=2)  # what its narrowest member can
    halved_blocks: Ints = halves.sum(axis=1) * lanes.exists[members].all(axis=1)
    return alone_blocks, halved_blocks


def _plan(demand: MemoryDemand, way: Way, low_s: float) -> RestorePlan:
    lanes, here = _lanes(demand, way), demand.by_member[way.group.leader]
    share = here.demand_blocks / max(1, sum(lane.num_blocks for lane in lanes))
    weight_bytes, kv_bytes = moved_bytes(lanes, here)
    whose = "what its members hold alone" if way.is_alone else f"what {' and '.join(map(str, way.parts))} hold"
    why = f"memory: demand {share:.2f} of {whose} for {low_s:.1f} s"
    why += f", {format_bytes(weight_bytes)} of parameters come back"
    parts = () if way.is_alone else way.parts
    return RestorePlan(group=way.group, parts=parts, weight_bytes=weight_bytes, kv_bytes=kv_bytes, why=why)


def moved_bytes(lanes: Collection[KvCapacity], here: GroupDemand) -> tuple[int, int]:
    """Bytes of parameters and of KV that a restore moves, given the lanes of what the pipeline ends in.

    Of s stages each has 1/s of the parameters. Of n parts each needs all of them, so that (s/n) members have n/s each;
    and a request goes on in one of the n, whose members have 1/n of its KV.
    """
    num_stages, num_parts = here.group.degree, max(1, len(lanes))
    weight_bytes = sum(lane.weight_bytes for lane in lanes) * (num_stages - num_stages // num_parts) // num_stages
    bytes_per_block = max((lane.bytes_per_block for lane in lanes), default=0)
    return weight_bytes, here.resident_blocks * bytes_per_block * (num_parts - 1) // num_parts


def _lanes(demand: MemoryDemand, way: Way) -> list[KvCapacity]:
    """What each part would hold; empty where one cannot run."""
    lanes = [part_capacity(demand.instances, part) for part in way.parts]
    return [lane for lane in lanes if lane is not None] if None not in lanes else []
