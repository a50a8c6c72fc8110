"""Which waiting requests go on to an instance that can begin them now. Pure.

Where a request goes is decided when it comes, by what is known then. Answers are of very different lengths, so that
later one instance has no memory left and lets requests wait, while another one has. A request that waits holds no KV:
elsewhere it costs what it would cost here, and begins at once. So no price is asked (`judge/moves.py` prices others).
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeVar

import numpy as np

from pengserve.planners.columns import GroupTable, Ints, ReadyInstances, ready_instances, rows, whole_groups
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.orders import Redirect
from pengserve.planners.types.snapshot import ClusterSnapshot

R = TypeVar("R")

RESERVE = 0.1  # of a target's blocks, that stay free for what runs there
MOST_CACHED = 0.5  # of a request's tokens, that its instance may have in its prefix cache: more are worth a wait


class _Pair(NamedTuple):
    """A group that is stuck and one with room, by their leaders."""

    source: InstanceId
    target: InstanceId
    queued_tokens: int  # of all that waits at the source
    room_tokens: int  # for what the target may be sent


def plan_redirects(
    snapshot: ClusterSnapshot, *, name: str, excluded: Collection[InstanceId] = ()
) -> tuple[Redirect, ...]:
    """One order for each pair of a group that is stuck and one with room; ids begin with `name`.

    Args:
        excluded: instances that neither give nor get any, since they change their shape or leave.
    """
    instances = ready_instances(snapshot.instances)
    return tuple(
        Redirect(
            order_id=f"{name}-{pair.source}",
            source=instances[pair.source].key,
            target=instances[pair.target].key,
            max_tokens=pair.room_tokens,
        )
        for pair in _pairs(snapshot, instances, excluded)
    )


def relieved(snapshot: ClusterSnapshot) -> frozenset[InstanceId]:
    """Leaders of the stuck groups that can send on all that waits there: they need no more memory."""
    pairs = _pairs(snapshot, ready_instances(snapshot.instances), snapshot.busy)
    return frozenset(pair.source for pair in pairs if pair.queued_tokens <= pair.room_tokens)


def _pairs(snapshot: ClusterSnapshot, instances: ReadyInstances, excluded: Collection[InstanceId]) -> Iterable[_Pair]:
    """A group is stuck where requests without KV wait, and the mean one of them finds no blocks or no slot. It has room
    where none waits, a slot is free, and so is more than what its running requests may soon need: a block each, and
    `RESERVE` of all. Else they would be preempted for what it is sent. The longest queue goes to the most room.
    """
    table = whole_groups(snapshot.layout.groups, instances)
    at = table.leader_ids
    all_waiting = instances.stat("num_waiting")[at]
    if not all_waiting.any():
        return ()
    used, total, running, block, queued, holding, parked = (
        instances.stat(field)[at]
        for field in (
            "kv_blocks_used", "kv_blocks_total", "num_running", "block_size", "queued_tokens",
            "num_holding", "num_parked",
        )
    )  # fmt: skip
    is_able = instances.runs(table) & (total > 0) & ~np.isin(at, list(excluded))
    has_slot = running < _slots(table, instances)
    waiting = np.maximum(0, all_waiting - holding - parked)
    needed = queued // np.maximum(1, waiting) // np.maximum(1, block) + 1  # blocks of the mean one
    is_stuck = is_able & (waiting > 0) & (~has_slot | (used + needed > total))
    free = total - used - np.maximum(running, (RESERVE * total).astype(np.int64))
    room = np.where(is_able & has_slot & (all_waiting == 0), free * block, 0)
    queues, roomy = np.flatnonzero(is_stuck), np.flatnonzero(room > 0)
    queues = queues[np.lexsort((at[queues], -queued[queues]))]
    roomy = roomy[np.lexsort((at[roomy], -room[roomy]))]
    num = min(len(queues), len(roomy))
    queues, roomy = queues[:num], roomy[:num]
    return rows(_Pair, at[queues].tolist(), at[roomy].tolist(), queued[queues].tolist(), room[roomy].tolist())


def choose_redirected(waiting: Iterable[tuple[R, int, int]], max_tokens: int) -> list[R]:
    """Which requests leave, of so many tokens at most: the next ones first.

    Args:
        waiting: each request without KV, the next one first; its tokens; those of them in the prefix cache here.
    """
    found = []
    for request, num_tokens, num_cached in waiting:
        if num_tokens <= max_tokens and num_cached <= MOST_CACHED * num_tokens:
            found.append(request)
            max_tokens -= num_tokens
    return found


def _slots(table: GroupTable, instances: ReadyInstances) -> Ints:
    """Requests that may run at once in each group."""
    found = instances.lanes("dp")["max_num_seqs"][table.leader_ids]
    for alike in table.wide:
        found[alike.at] = instances.lanes(alike.shape)["max_num_seqs"][alike.members[:, 0]]
    return found
