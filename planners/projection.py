"""The load that each tp group would have if it were formed now: `ClusterView.projected` of all of them at once."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pengserve.planners.columns import Bools, Floats, Ints, Kept, capacities, ints
from pengserve.planners.load import OVERLOAD, ClusterView, num_slots
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """Loads of the instances that are alone, in columns by instance id."""

    is_alone: Bools
    is_known: Bools
    is_queue: Bools
    num_requests: Ints
    kv_share: Floats


def projected_loads(view: ClusterView, max_degree: int) -> Iterator[tuple[Group, float, bool]]:
    """Each tp group of at most `max_degree` that could be built of groups of the layout: its load, if that is known."""
    buckets = [
        (groups, members) for groups, members in _by_degree(view.tp_groups) if 1 < groups[0].degree <= max_degree
    ]
    size = 1 + max([0, *view.table.members, *(int(members.max()) for _, members in buckets)])
    alone = _alone(view, size)
    for groups, members in buckets:
        is_alone = alone.is_alone[members].all(axis=1)
        yield from _of_instances(view, alone, [groups[i] for i in np.flatnonzero(is_alone)], members[is_alone])
        for i in np.flatnonzero(~is_alone):
            load = view.projected(groups[i])
            if load is not None:
                yield groups[i], load.load, load.is_known


def _of_instances(
    view: ClusterView, alone: _Alone, groups: list[Group], members: Ints
) -> Iterator[tuple[Group, float, bool]]:
    """Of groups whose members are all alone."""
    if not groups:
        return
    degree = members.shape[1]
    lanes = capacities([view.instances[InstanceId(i)] for i in members[:, 0].tolist()], groups[0].shape)
    slots = ints(1 if lane is None else num_slots(lane, degree, view.busy_requests) for lane in lanes)
    kv_share = np.zeros(len(groups))
    for place in range(degree):  # in this order, as floats are added up one by one elsewhere
        kv_share = kv_share + alone.kv_share[members[:, place]]
    load = np.maximum(kv_share / degree, alone.num_requests[members].sum(axis=1) / slots)
    load = np.where(alone.is_queue[members].any(axis=1), np.maximum(load, OVERLOAD), load)
    is_known = alone.is_known[members].all(axis=1)
    for group, lane, value, known in zip(groups, lanes, load.tolist(), is_known.tolist(), strict=True):
        if lane is not None:
            yield group, value, known


def _alone(view: ClusterView, size: int) -> _Alone:
    """As `load._load` for instances that are alone."""
    table = view.table
    ids = [leader for leader, is_dp in zip(table.leaders, table.is_dp.tolist(), strict=True) if is_dp]
    instances = [view.instances[i] for i in ids]
    stats, lanes = [i.stats for i in instances], capacities(instances, GroupKind.DP)
    is_known = [s.shape == GroupKind.DP and lane is not None for s, lane in zip(stats, lanes, strict=True)]
    of_lane = [(0, 0) if lane is None else (lane.block_size, lane.num_blocks) for lane in lanes]
    block_size = ints(s.block_size or lane[0] for s, lane in zip(stats, of_lane, strict=True)).clip(1)
    num_blocks = ints(s.kv_blocks_total or lane[1] for s, lane in zip(stats, of_lane, strict=True)).clip(1)
    blocks = ints(s.kv_blocks_used for s in stats) - (-ints(s.queued_tokens for s in stats) // block_size)
    num_waiting, known = ints(s.num_waiting for s in stats), np.array(is_known, dtype=np.bool_)
    is_queue = np.array([i in view.loads.queues for i in ids], dtype=np.bool_) | (num_waiting > 1)
    return _Alone(
        is_alone=_spread(ids, np.ones(len(ids), dtype=np.bool_), size),
        is_known=_spread(ids, known, size),
        is_queue=_spread(ids, is_queue & known, size),
        num_requests=_spread(ids, ints(s.num_running for s in stats) + num_waiting, size),
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
