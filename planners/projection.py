"""The load that each tp group would have if it were formed now: `ClusterView.projected` of all of them at once."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pengserve.planners.columns import Bools, Floats, Ints, Kept, spread
from pengserve.planners.load import OVERLOAD, ClusterView
from pengserve.planners.types.layout import Group, GroupKind


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """Loads of the instances that are alone, in columns by instance id."""

    is_alone: Bools
    is_known: Bools
    is_queue: Bools
    num_requests: Ints
    kv_share: Floats


def projected_loads(
    view: ClusterView, max_degree: int, below: float, most: int | None = None
) -> Iterator[tuple[Group, float, bool]]:
    """Tp groups of at most `max_degree` that could be built of groups of the layout: load, and whether it is known.

    Those whose load is known, and not `below` that, are left out. Of those of instances that are alone only so many of
    each degree need be there as `most` says, the idlest; with others that are as idle.
    """
    buckets = [
        (groups, members) for groups, members in _by_degree(view.tp_groups) if 1 < groups[0].degree <= max_degree
    ]
    size = max([view.table.size, view.instances.size, *(1 + int(members.max()) for _, members in buckets)])
    alone, is_bound = _alone(view, size), _is_bound(view, size)
    for groups, members in buckets:
        is_alone: Bools = np.asarray(alone.is_alone[members].all(axis=1))
        at = np.flatnonzero(is_alone)
        yield from _of_instances(view, alone, groups, members[at], at, below, most)
        for i in np.flatnonzero(~(is_alone | is_bound[members].any(axis=1))).tolist():
            load = view.projected(groups[i])
            if load is not None and (load.load < below or not load.is_known):
                yield groups[i], load.load, load.is_known


def tp_groups_by_work(view: ClusterView, degree: int) -> Iterator[tuple[Group, tuple[float, float]]]:
    """Tp groups of that degree, of the layout or not, those first whose members have least to do; then by rank.

    With bounds from below of the requests of all groups that have any of these members, and of their shares of KV.
    """
    for groups, members in _by_degree(view.tp_groups):
        if groups[0].degree != degree:
            continue
        size = max(view.table.size, view.instances.size, 1 + int(members.max()))
        alone, of_leader = _alone(view, size), view.instances.stat("num_running") + view.instances.stat("num_waiting")
        requests = alone.num_requests.astype(np.float64)
        for alike in view.table.wide:  # where a group also has other members, they count there
            requests[alike.members] = of_leader[alike.members[:, :1]] / alike.members.shape[1]
        least, kv_share = requests[members].sum(axis=1).round(6), alone.kv_share[members].sum(axis=1)
        order = np.lexsort((*members.T[::-1], kv_share, least))
        for i, num, share in zip(order.tolist(), least[order].tolist(), kv_share[order].tolist(), strict=True):
            yield groups[i], (num, share)


def _of_instances(
    view: ClusterView, alone: _Alone, groups: list[Group], members: Ints, at: Ints, below: float, most: int | None
) -> Iterator[tuple[Group, float, bool]]:
    """Of `groups` those at these positions, whose `members` are all alone."""
    degree = members.shape[1]
    lanes, first = view.instances.lanes(f"{GroupKind.TP}{degree}"), members[:, 0]
    slots = np.minimum(lanes["max_num_seqs"][first], view.busy_requests * degree).clip(1)  # as `num_slots`
    kv_share = np.zeros(len(at))
    for place in range(degree):  # in this order, as floats are added up one by one elsewhere
        kv_share = kv_share + alone.kv_share[members[:, place]]
    load = np.maximum(kv_share / degree, alone.num_requests[members].sum(axis=1) / slots)
    load = np.where(alone.is_queue[members].any(axis=1), np.maximum(load, OVERLOAD), load)
    is_known: Bools = np.asarray(alone.is_known[members].all(axis=1))
    shown = np.flatnonzero(lanes.exists[first] & ((load < below) | ~is_known))
    if most is not None and len(shown) > most:
        known_load = np.where(is_known[shown], load[shown], np.inf)
        shown = shown[known_load <= np.partition(known_load, most - 1)[most - 1]]
    for i, value, known in zip(at[shown].tolist(), load[shown].tolist(), is_known[shown].tolist(), strict=True):
        yield groups[i], value, known


def _alone(view: ClusterView, size: int) -> _Alone:
    """As `load._load` for instances that are alone."""
    ready, ids = view.instances, view.table.leader_ids[view.table.is_dp]
    lanes, leaders = ready.lanes(GroupKind.DP), ids.tolist()
    is_known = ready.runs(view.table)[view.table.is_dp] & lanes.exists[ids]
    block_size, num_blocks = ready.stat("block_size")[ids], ready.stat("kv_blocks_total")[ids]
    block_size = np.where(block_size, block_size, lanes["block_size"][ids]).clip(1)
    num_blocks = np.where(num_blocks, num_blocks, lanes["num_blocks"][ids]).clip(1)
    blocks = ready.stat("kv_blocks_used")[ids] - (-ready.stat("queued_tokens")[ids] // block_size)
    num_waiting, queues = ready.stat("num_waiting")[ids], view.loads.queues
    is_queue = num_waiting > 1
    if queues:
        is_queue |= np.fromiter(map(queues.__contains__, leaders), dtype=np.bool_)
    return _Alone(
        is_alone=spread(ids, np.ones(len(ids), dtype=np.bool_), size),
        is_known=spread(ids, is_known, size),
        is_queue=spread(ids, is_queue & is_known, size),
        num_requests=spread(ids, ready.stat("num_running")[ids] + num_waiting, size),
        kv_share=spread(ids, np.where(is_known, blocks / num_blocks, 0.0), size),
    )


def _is_bound(view: ClusterView, size: int) -> Bools:
    """By instance id, whether it is in a pipeline: no tp group can be built of it."""
    is_bound = np.zeros(size, dtype=np.bool_)
    for alike in view.table.wide:
        is_bound[alike.members] = alike.kind is GroupKind.PP
    return is_bound


def _make_by_degree(groups: tuple[Group, ...]) -> tuple[tuple[list[Group], Ints], ...]:
    """Groups of one degree, and their members `[group, place]`."""
    by_degree: dict[int, list[Group]] = {}
    for group in groups:
        by_degree.setdefault(group.degree, []).append(group)
    return tuple((found, np.array([g.members for g in found], dtype=np.int64)) for found in by_degree.values())


_by_degree = Kept(_make_by_degree)
