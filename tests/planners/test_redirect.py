"""Laws of redirects: only what waits for room leaves, only for where it can begin; no target becomes stuck by it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.redirect import choose_redirected, plan_redirects, relieved
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind, Layout
from pengserve.planners.types.orders import Redirect
from pengserve.planners.types.snapshot import (
    ClusterSnapshot,
    InstanceSnapshot,
    InstanceState,
    InstanceStats,
    KvCapacity,
    LaneInfo,
)
from tests.controller.fakes import life

BLOCKS, BLOCK, SLOTS = 64, 32, 16
CAPACITY = KvCapacity(
    num_blocks=BLOCKS, block_size=BLOCK, bytes_per_block=1, max_model_len=2048, max_num_seqs=SLOTS, weight_bytes=1
)


def instance(instance_id: int, used: int, waiting: int = 0, running: int = 4, **stats: int) -> InstanceSnapshot:
    """An instance alone; each request that waits has 100 tokens."""
    told = {
        "kv_blocks_used": used, "kv_blocks_total": BLOCKS, "block_size": BLOCK, "num_running": running,
        "num_waiting": waiting, "queued_tokens": 100 * waiting,
    }  # fmt: skip
    return InstanceSnapshot(
        key=life(instance_id),
        state=InstanceState.READY,
        capacity=CAPACITY,
        lanes=tuple(LaneInfo(shape=shape, capacity=CAPACITY) for shape in ("dp", "tp2")),
        stats=InstanceStats(**(told | stats)),
    )


def cluster(*instances: InstanceSnapshot, groups: tuple[Group, ...] = ()) -> ClusterSnapshot:
    """A snapshot of these, alone but for those in `groups`."""
    together = {member for group in groups for member in group.members}
    ids = [one.key.instance_id for one in instances]
    alone = tuple(Group(kind=GroupKind.DP, members=(i,)) for i in ids if i not in together)
    return ClusterSnapshot(app="x", time_s=1.0, instances=instances, layout=Layout(epoch=1, groups=(*groups, *alone)))


def pairs(orders: tuple[Redirect, ...]) -> list[tuple[int, int]]:
    """Sources and targets."""
    return [(order.source.instance_id, order.target.instance_id) for order in orders]


@given(st.lists(st.tuples(st.integers(0, BLOCKS), st.integers(0, 6), st.integers(0, SLOTS)), min_size=1, max_size=8))
def test_only_what_is_stuck_leaves_and_only_for_room(loads: list[tuple[int, int, int]]) -> None:
    seen = cluster(*(instance(i, *load) for i, load in enumerate(loads)))
    orders = plan_redirects(seen, name="x")
    assert orders == plan_redirects(seen, name="x")
    ends = [end for pair in pairs(orders) for end in pair]
    assert len(set(ends)) == len(ends), "an instance is in one pair at most"
    for source, target in pairs(orders):
        used, waiting, running = loads[source]
        assert waiting and (used + 100 // BLOCK + 1 > BLOCKS or running == SLOTS)
        used, waiting, running = loads[target]
        assert not waiting and running < SLOTS
    for order in orders:
        used, _, running = loads[order.target.instance_id]
        assert used + order.max_tokens / BLOCK + max(running, BLOCKS // 10) == BLOCKS, "what runs there grows"


def test_the_longest_queue_goes_to_the_most_room() -> None:
    seen = cluster(instance(0, 64, 2), instance(1, 62, 5), instance(2, 30), instance(3, 10), instance(4, 63, 1))
    assert pairs(plan_redirects(seen, name="x")) == [(1, 3), (0, 2)]


@pytest.mark.parametrize(
    "source",
    [
        instance(0, 40, 3),  # it begins with the next step
        instance(0, 64, 3, num_holding=3),  # with their KV
        instance(0, 64, 3, num_parked=3),
        instance(0, 64),
    ],
)
def test_what_will_begin_or_holds_kv_stays(source: InstanceSnapshot) -> None:
    assert plan_redirects(cluster(source, instance(1, 0)), name="x") == ()


def test_one_without_a_slot_is_stuck_and_is_no_target() -> None:
    full = instance(0, 20, 3, running=SLOTS)
    assert pairs(plan_redirects(cluster(full, instance(1, 20)), name="x")) == [(0, 1)]
    assert plan_redirects(cluster(full, instance(1, 20, running=SLOTS)), name="x") == ()


def test_a_group_is_known_by_its_leader_and_one_whose_shape_changes_is_left_out() -> None:
    group = Group(kind=GroupKind.TP, members=(InstanceId(1), InstanceId(2)))
    leader = instance(1, 10)
    seen = cluster(instance(0, 64, 3), leader, instance(2, 0), groups=(group,))
    assert plan_redirects(seen, name="x") == (), "the leader does not say yet that it runs the group"
    leader = replace(leader, stats=replace(leader.stats, shape="tp2"))
    seen = cluster(instance(0, 64, 3), leader, instance(2, 0), groups=(group,))
    assert pairs(plan_redirects(seen, name="x")) == [(0, 1)]
    for member in (0, 1):
        assert plan_redirects(seen, name="x", excluded=[InstanceId(member)]) == ()


def test_the_next_ones_leave_first_but_for_those_whose_prefix_is_here() -> None:
    waiting = [("a", 100, 0), ("b", 100, 64), ("c", 300, 0), ("d", 90, 32), ("e", 50, 0)]
    assert choose_redirected(waiting, 200) == ["a", "d"]
    assert choose_redirected(waiting, 240) == ["a", "d", "e"]
    assert choose_redirected(waiting, 49) == []


def test_a_queue_that_can_begin_elsewhere_as_a_whole_needs_no_memory() -> None:
    full, roomy = instance(0, BLOCKS, waiting=3), instance(1, BLOCKS // 2)
    assert relieved(cluster(full, roomy)) == {0}
    assert not relieved(cluster(instance(0, BLOCKS, waiting=30), roomy)), "only some of them can"
    assert not relieved(cluster(full, instance(1, BLOCKS - 2)))
    assert not relieved(cluster(instance(0, BLOCKS), roomy)), "nothing waits"
