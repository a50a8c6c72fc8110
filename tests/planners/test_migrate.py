"""Laws of an evacuation: no target gets more than it has free, together they get all that they can take."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.migrate import plan_evacuation
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
    assert len({order.order_id for order in orders}) == len(orders)
    assert [order.must_leave for order in orders].count(True) == (must_leave and bool(targets))


def test_a_queue_counts_as_no_room() -> None:
    source = instance(9, 20)
    crowded, free = instance(0, 10, queued_tokens=4000), instance(1, 30)
    (order,) = plan_evacuation(source, [crowded, free], name="x", must_leave=False)
    assert order.target == free.key
    assert plan_evacuation(source, [replace(crowded)], name="x", must_leave=False) == ()
