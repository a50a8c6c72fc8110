"""Laws of an evacuation: no target gets more than it has free, together they get all that they can take."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.migrate import plan_evacuation, plan_rebalance
from pengserve.planners.types.config import MigrateConfig
from pengserve.planners.types.snapshot import InstanceSnapshot, InstanceState, InstanceStats
from tests.controller.fakes import life


def instance(instance_id: int, used: int, queued_tokens: int = 0) -> InstanceSnapshot:
    stats = InstanceStats(kv_blocks_used=used, kv_blocks_total=64, block_size=32, queued_tokens=queued_tokens)
    return InstanceSnapshot(key=life(instance_id), state=InstanceState.READY, stats=stats)


@given(st.integers(0, 64), st.lists(st.integers(0, 64), max_size=6), st.booleans())
def test_shares_follow_the_room(used: int, targets: list[int], must_leave: bool) -> None:
    source, others = instance(9, used), [instance(i, n) for i, n in enumerate(targets)]
    orders = plan_evacuation(source, others, name="x", must_leave=must_leave)
    assert orders == plan_evacuation(source, list(reversed(others)), name="x", must_leave=must_leave)
    free = {other.key: (64 - other.stats.kv_blocks_used) * 32 for other in others}
    assert all(order.source == source.key and order.max_tokens <= free[order.target] for order in orders)
    assert sum(order.max_tokens for order in orders) >= min(used * 32, sum(free.values()))
    assert all(order.max_tokens == free[order.target] for order in orders[-1:]), "what has grown since finds a place"
    assert len({order.order_id for order in orders}) == len(orders)
    assert [order.must_leave for order in orders].count(True) == (must_leave and bool(targets))


def test_a_queue_counts_as_no_room() -> None:
    source = instance(9, 20)
    crowded, free = instance(0, 10, queued_tokens=4000), instance(1, 30)
    (order,) = plan_evacuation(source, [crowded, free], name="x", must_leave=False)
    assert order.target == free.key
    assert plan_evacuation(source, [replace(crowded)], name="x", must_leave=False) == ()


CONFIG = MigrateConfig(is_auto=True)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 2000)), max_size=8))
def test_rebalancing_never_makes_the_free_one_the_fuller(loads: list[tuple[int, int]]) -> None:
    instances = [instance(i, used, queued) for i, (used, queued) in enumerate(loads)]
    of = {found.key: found for found in instances}
    orders = plan_rebalance(instances, CONFIG, name="x")
    assert orders == plan_rebalance(list(reversed(instances)), CONFIG, name="x")
    ends = [key for order in orders for key in (order.source, order.target)]
    assert len(set(ends)) == len(ends), "an instance is in one pair at most"
    for order in orders:
        source, target, moved = of[order.source].stats, of[order.target].stats, order.max_tokens / 32
        assert not order.must_leave and not order.empties
        assert target.kv_blocks_used + moved <= source.kv_blocks_used - moved + 1e-9
        assert moved <= (64 - target.kv_blocks_used) / 2


def test_full_instances_are_paired_with_free_ones_the_fullest_with_the_freest() -> None:
    orders = plan_rebalance([instance(i, used) for i, used in enumerate((60, 64, 10, 30, 45))], CONFIG, name="x")
    assert [(order.source, order.target) for order in orders] == [(life(1), life(2)), (life(0), life(3))]
    assert [order.max_tokens for order in orders] == [27 * 32, 15 * 32]
    assert plan_rebalance([instance(0, 50), instance(1, 0)], CONFIG, name="x") == (), "no one is full"
    assert plan_rebalance([instance(0, 64), instance(1, 40)], CONFIG, name="x") == (), "no one is free"
