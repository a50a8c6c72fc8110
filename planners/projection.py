"""The load that each tp group would have if it were formed now: `ClusterView.projected` of all of them at once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from pengserve.planners.columns import Bools, Floats, Ints, Kept, capacities, column, ints
from pengserve.planners.load import OVERLOAD, ClusterView
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.snapshot import InstanceSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """Loads of the instances that are alone, in columns by instance id."""

    is_alone: Bools
    is_known: Bools
    is_queue: Bools
    num_requests: Ints
    kv_share: Floats


def projected_loads(view: ClusterView, max_degree: int, below: float) -> Iterator[tuple[Group, float, bool]]:
    """Tp groups of at most `max_degree` that could be built of groups of the layout: load, and whether it is known.

    Those whose load is known, and not `below` that, are left out.
    """
    buckets = [
        (groups, members) for groups, members in _by_degree(view.tp_groups) if 1 < groups[0].degree <= max_degree
    ]
    size = max([view.table.size, *(1 + int(members.max()) for _, members in buckets)])
    alone = _alone(view, size)
    for groups, members in buckets:
        is_alone: Bools = np.asarray(alone.is_alone[members].all(axis=1))
        at = np.flatnonzero(is_alone)
        yield from _of_instances(view, alone, groups, members[at], at, below)
        for i in np.flatnonzero(~is_alone).tolist():
            load = view.projected(groups[i])
            if load is not None and (load.load < below or not load.is_known):
                yield groups[i], load.load, load.is_known


def _of_instances(
    view: ClusterView, alone: _Alone, groups: list[Group], members: Ints, at: Ints, below: float
) -> Iterator[tuple[Group, float, bool]]:
    """Of `groups` those at these positions, whose `members` are all alone."""
    degree = members.shape[1]
    instance_of = cast(Mapping[int, InstanceSnapshot], view.instances)
    lanes = capacities([instance_of[i] for i in members[:, 0].tolist()], f"{GroupKind.TP}{degree}")
    most = ints([0 if lane is None else lane.max_num_seqs for lane in lanes])
    has_lane = np.array([lane is not None for lane in lanes], dtype=np.bool_)
    slots = np.minimum(most, view.busy_requests * degree).clip(1)  # as `num_slots`
    kv_share = np.zeros(len(at))
    for place in range(degree):  # in this order, as floats are added up one by one elsewhere
        kv_share = kv_share + alone.kv_share[members[:, place]]
    load = np.maximum(kv_share / degree, alone.num_requests[members].sum(axis=1) / slots)
    load = np.where(alone.is_queue[members].any(axis=1), np.maximum(load, OVERLOAD), load)
    is_known: Bools = np.asarray(alone.is_known[members].all(axis=1))
    shown = np.flatnonzero(has_lane & ((load < below) | ~is_known))
    for i, value, known in zip(at[shown].tolist(), load[shown].tolist(), is_known[shown].tolist(), strict=True):
        yield groups[i], value, known


def _alone(view: ClusterView, size: int) -> _Alone:
    """As `load._load` for instances that are alone."""
    table = view.table
    ids = [leader for leader, is_dp in zip(table.leaders, table.is_dp.tolist(), strict=True) if is_dp]
    instances = [view.instances[i] for i in ids]
    stats, lanes = [i.stats for i in instances], capacities(instances, GroupKind.DP)
    is_known = [s.shape == GroupKind.DP and lane is not None for s, lane in zip(stats, lanes, strict=True)]
    block_size, num_blocks = column(stats, "block_size"), column(stats, "kv_blocks_total")
    block_size = np.where(block_size, block_size, [lane.block_size if lane else 0 for lane in lanes]).clip(1)
    num_blocks = np.where(num_blocks, num_blocks, [lane.num_blocks if lane else 0 for lane in lanes]).clip(1)
    blocks = column(stats, "kv_blocks_used") - (-column(stats, "queued_tokens") // block_size)
    num_waiting, known = column(stats, "num_waiting"), np.array(is_known, dtype=np.bool_)
    is_queue = np.array([i in view.loads.queues for i in ids], dtype=np.bool_) | (num_waiting > 1)
    return _Alone(
        is_alone=_spread(ids, np.ones(len(ids), dtype=np.bool_), size),
        is_known=_spread(ids, known, size),
        is_queue=_spread(ids, is_queue & known, size),
        num_requests=_spread(ids, column(stats, "num_running") + num_waiting, size),
        kv_share=_spread(ids, np.where(known, blocks / num_blocks, 0.0), size),
    )


def _spread(ids: list[InstanceId], values: np.ndarray, size: int) -> np.ndarray:
    """The column by instance id; 0 where nothing is known."""
    column = np.zeros(size, dtype=values.dtype)
    column[ids] = values
    return column


def _make_by_degree(groups: tuple[Group, ...]) -> tuple[tuple[list[Group], Ints], ...]:
    """Groups of one degree, and their members `[group, place]`."""
    by_degree: dict[int, list[Group]] = {}
    for group in groups:
        by_degree.setdefault(group.degree, []).append(group)
    return tuple((found, np.array([g.members for g in found], dtype=np.int64)) for found in by_degree.values())


_by_degree = Kept(_make_by_degree)
