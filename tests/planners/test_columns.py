"""The law of planning in columns: it decides as planning value by value does (`reference.py`)."""

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.planners.columns import Kept, ReadyInstances
from pengserve.planners.demand_trend import MIN_GAP_S, MIN_LOOKS, DemandTrend
from pengserve.planners.drop import Verdict, plan_drop
from pengserve.planners.load import ClusterView
from pengserve.planners.overload import DemandHistory, predict_demand
from pengserve.planners.prices import Prices
from pengserve.planners.projection import projected_loads
from pengserve.planners.restore import RestoreHistory, plan_restore
from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group
from pengserve.planners.types.snapshot import NUMBERS, ClusterSnapshot, Demand, InstanceStats, LaneInfo
from tests.planners import reference
from tests.planners.clusters import BLOCK_SIZE, T0_S, pipeline_capacity, snapshot, stats
from tests.support.effort import examples
from tests.support.speed import least_cpu_s, slowness

CONFIG = DropConfig(max_stages=8)
LAYOUTS = [
    "",
    "",
    "tp2@(0,1)",
    "pp2@(2,3)",
    "tp4@(4..7)",
    "tp2@(0,1) pp2@(2,3) pp4@(4..7)",
    "pp2@(0,1) pp2@(2,3)",
    "pp2@(3,4)",  # ranks have shifted under it
    "pp4@(2..5)",
    "pp8@(0..7)",
]


@pytest.mark.parametrize("is_off_a_wire", [False, True])
def test_columns_are_what_each_instance_says(is_off_a_wire: bool) -> None:
    said = {i: stats(requests=i, waiting=7 - i, blocks=10 * i) for i in (0, 1, 3, 4)}
    said[3] = replace(said[3], is_follower=True, total_step_us=1 << 62, total_copy_wait_s=0.5)
    seen = snapshot(5, loads=said, without=[2])
    instances = pickle.loads(pickle.dumps(seen.instances)) if is_off_a_wire else seen.instances
    assert instances == seen.instances and instances[3].stats.is_follower is True
    changed = replace(instances[4], stats=replace(instances[4].stats, num_waiting=9))
    found = ReadyInstances((*instances[:4], changed))
    assert found.stat("num_waiting").tolist() == [7, 6, 0, 4, 9]
    assert found.stat("is_follower").tolist() == [0, 0, 0, 1, 0]
    for name in NUMBERS:
        values = [getattr(found[i].stats, name) if i in found else 0 for i in map(InstanceId, range(5))]
        assert found.stat(name).tolist() == values
    step_us, waiting = found.stats(["total_step_us", "num_waiting"]).tolist()
    assert found.ids.tolist() == [0, 1, 3, 4] and step_us == [0, 0, 1 << 62, 0] and waiting == [7, 6, 4, 9]


@pytest.mark.parametrize("without", [[], [2]])
def test_shapes_are_found_by_instance_in_any_order(without: list[InstanceId]) -> None:
    seen = snapshot(4, "tp2@(0,1)", without=without)
    there = {i: "tp2" if i < 2 else "dp" for i in range(4) if i not in without}
    for order in ((0, 1, 2, 3), (3, 0, 2, 1)):
        found = ReadyInstances(tuple(seen.instances[i] for i in order))
        assert dict(zip(found, found.run, strict=True)) == there
        assert found.shapes == [there.get(i, "") for i in range(4)]


def test_what_is_kept_is_of_the_same_objects() -> None:
    calls = list[tuple[list[int], list[int]]]()
    kept = Kept(lambda left, right: calls.append((left, right)) or [*left, *right])
    one, two = [1], [2]
    assert kept(one, two) is kept(one, two) and len(calls) == 1
    assert kept(one, [2]) == [1, 2] and len(calls) == 2, "an equal object is another one"
    assert kept([1], two) == [1, 2] and len(calls) == 3


@st.composite
def loads(draw: st.DrawFn, shape: str) -> InstanceStats:
    waiting = draw(st.sampled_from([0, 0, 1, 4, 40]))
    block_size = draw(st.sampled_from([0, 0, BLOCK_SIZE, 2 * BLOCK_SIZE]))
    return replace(
        stats(
            draw(st.sampled_from([shape] * 6 + ["dp", "tp2"])),
            draw(st.integers(0, 40)),
            waiting,
            draw(st.sampled_from([0, 10, 40, 61, 64, 200])),
            queued_tokens=draw(st.sampled_from([0, 1, 60, 300])) * BLOCK_SIZE if waiting else 0,
            num_paused=draw(st.sampled_from([0, 0, 0, 0, 2])),
        ),
        is_follower=draw(st.sampled_from([False] * 7 + [True])),
        block_size=block_size,
        kv_blocks_total=draw(st.sampled_from([0, 64, 64, 160])),
    )


@st.composite
def clusters(draw: st.DrawFn) -> ClusterSnapshot:
    layout = draw(st.sampled_from(LAYOUTS))
    shape = {m: g.shape for g in map(Group.parse, layout.split()) for m in g.members}
    given_loads = {i: draw(loads(shape.get(InstanceId(i), "dp"))) for i in range(8)}
    without = [InstanceId(i) for i in draw(st.lists(st.integers(0, 7), max_size=1))]
    waiting = st.builds(Demand, num_waiting=st.integers(0, 30), longest_waiting_tokens=st.sampled_from([0, 0, 9000]))
    seen = snapshot(8, layout, given_loads, without=without, max_stages=8, demands=draw(st.lists(waiting, max_size=2)))
    odd = draw(st.integers(0, 7))  # one that can do other things than its neighbours
    kind = draw(st.sampled_from(["as the others", "no lanes", "wide", "few"]))
    wide = LaneInfo(shape="pp4", capacity=replace(pipeline_capacity(4), num_blocks=999))
    lanes = {
        "no lanes": (),
        "wide": (wide, *seen.instances[odd].lanes),
        "few": tuple(replace(lane, capacity=None) for lane in seen.instances[odd].lanes[2:]),
    }
    if kind in lanes:
        changed = replace(seen.instances[odd], lanes=lanes[kind])
        seen = replace(seen, instances=(*seen.instances[:odd], changed, *seen.instances[odd + 1 :]))
    return seen


@settings(max_examples=examples(150))
@given(st.lists(st.tuples(clusters(), st.sampled_from([0.1, 0.2, 0.5, 0.5, 0.7, 3.0])), min_size=1, max_size=8))
def test_demand_and_its_history_are_those_of_the_reference(seen: list[tuple[ClusterSnapshot, float]]) -> None:
    history, expected_history = DemandHistory(), {}
    now_s = T0_S
    for look, gap_s in seen:
        now_s += gap_s
        look = replace(look, time_s=now_s)
        found, history = predict_demand(look, CONFIG, history)
        expected, expected_history = reference.predict_demand(look, CONFIG, expected_history)
        assert dict(found.by_member) == expected.by_member
        assert (found.instances, found.overloaded) == (expected.instances, expected.overloaded)
        assert_same_trends(history.trends, expected_history)


def assert_same_trends(found: Mapping[InstanceId, DemandTrend], expected: Mapping[InstanceId, DemandTrend]) -> None:
    assert dict(found) == dict(expected) and len(found) == len(expected)


@settings(max_examples=examples(600))
@given(
    clusters(),
    st.sampled_from([1, 2, 4, 8]),
    st.sets(st.integers(0, 7), max_size=2),
    st.lists(st.sampled_from([0, 0, 4, 10, 30]), min_size=8, max_size=8),
)
def test_a_drop_is_that_of_the_reference(
    seen: ClusterSnapshot, max_stages: int, taken: set[int], rises: list[int]
) -> None:
    assert_same_drop(seen, replace(CONFIG, max_stages=max_stages), frozenset(map(InstanceId, taken)), rises)


def test_a_drop_beside_a_pipeline_with_room_is_that_of_the_reference() -> None:
    """Above the target, but with room now: pp2@(2,3) stays out of it."""
    load = stats("dp", 1, 1, 61, queued_tokens=60 * BLOCK_SIZE)
    seen = snapshot(8, "pp2@(2,3)", {1: load}, max_stages=8, demands=[Demand(num_waiting=1)])
    found = assert_same_drop(seen, replace(CONFIG, max_stages=4), frozenset(), [0] * 8)
    assert found.plan is not None and [str(group) for group in found.plan.groups] == ["pp2@(0,1)"]


def assert_same_drop(
    seen: ClusterSnapshot, config: DropConfig, claimed: frozenset[InstanceId], rises: Sequence[int]
) -> Verdict:
    """`rises` is by how many blocks each instance's load rose from look to look before this one."""
    history, expected_history = DemandHistory(), {}
    for looks_before in reversed(range(MIN_LOOKS)):
        earlier = [
            replace(i, stats=replace(i.stats, kv_blocks_used=max(0, i.stats.kv_blocks_used - looks_before * rise)))
            for i, rise in zip(seen.instances, rises, strict=True)
        ]
        look = replace(seen, instances=tuple(earlier), time_s=seen.time_s - 2 * MIN_GAP_S * looks_before)
        demand, history = predict_demand(look, config, history)
        expected_demand, expected_history = reference.predict_demand(look, config, expected_history)
    found = plan_drop(seen, demand, config, claimed=claimed)
    assert found == reference.plan_drop(seen, expected_demand, config, claimed=claimed)
    return found


@settings(max_examples=examples(300))
@given(clusters(), clusters(), st.sampled_from([0.2, 0.5, 0.9]))
def test_pipelines_that_memory_does_not_need_are_those_of_the_reference(
    seen: ClusterSnapshot, after: ClusterSnapshot, restore_below: float
) -> None:
    config, history = replace(CONFIG, restore_below=restore_below), RestoreHistory()
    for look in (seen, replace(after, time_s=T0_S + 0.5)):
        demand, _ = predict_demand(look, config, DemandHistory())
        expected_demand, _ = reference.predict_demand(look, config, {})
        expected = reference.low_ways(look, expected_demand, config, history.low_since_s)
        _, history = plan_restore(look, demand, config, history)
        assert set(history.low_since_s) == expected


@settings(max_examples=examples(300))
@given(
    clusters(),
    st.sets(st.integers(0, 7), max_size=2),
    st.integers(1, 16),
    st.sampled_from([2, 4]),
    st.sampled_from([0.25, 1.0, 99.0]),
)
def test_projected_loads_are_those_of_the_view(
    seen: ClusterSnapshot, queues: set[int], busy_requests: int, max_degree: int, below: float
) -> None:
    view = ClusterView.of(seen, busy_requests, map(InstanceId, queues))
    found = {group: (load, is_known) for group, load, is_known in projected_loads(view, max_degree, below)}
    expected = {g: load for g in view.tp_groups if g.degree <= max_degree and (load := view.projected(g)) is not None}
    assert found == {
        group: (load.load, load.is_known) for group, load in expected.items() if load.load < below or not load.is_known
    }
    assert [view.is_known(group) for group in view.groups()] == [view.load(group).is_known for group in view.groups()]
    # Where only some are asked for, the idlest of each degree are there.
    some = list(projected_loads(view, max_degree, below, 2))
    assert {group: (load, is_known) for group, load, is_known in some}.items() <= found.items()
    for degree in (2, 4):
        least = sorted(load for group, (load, is_known) in found.items() if group.degree == degree and is_known)[:2]
        assert sorted(load for group, load, is_known in some if group.degree == degree and is_known)[:2] == least


@settings(max_examples=examples(100))
@given(clusters(), st.sampled_from([0.1, 0.5, 0.9]))
def test_the_price_of_waiting_is_the_sum_over_its_groups(seen: ClusterSnapshot, drop_above: float) -> None:
    config = replace(CONFIG, drop_above=drop_above, target=drop_above, restore_below=0, min_dwell_s=0.7)
    demand, _ = predict_demand(seen, config, DemandHistory())
    prices = Prices.of(demand, config)
    expected_s = 0.0
    for part in demand.overloaded:
        num_requests = max(1, part.num_running + part.num_waiting)
        excess_blocks = max(0.0, part.demand_blocks - drop_above * part.capacity_blocks)
        expected_s += num_requests * excess_blocks / max(1, part.demand_blocks) * config.min_dwell_s
    assert prices.keep_s == expected_s


def test_a_drop_for_a_thousand_overloaded_instances_takes_a_millisecond() -> None:
    """Aim: 1 ms, also where all are and none gets along with two stages. The bound leaves room for a busy machine."""
    for overloaded in (10, 2, 1):
        load, rest = stats("dp", 8, 8, 64, queued_tokens=100 * BLOCK_SIZE), stats("dp", 2, 0, 10)
        seen = snapshot(1000, loads={i: rest if i % overloaded else load for i in range(1000)}, max_stages=4)
        demand, _ = predict_demand(seen, CONFIG, DemandHistory())
        assert plan_drop(seen, demand, CONFIG).plan is not None
        least_s = least_cpu_s(partial(plan_drop, seen, demand, CONFIG), times=20)
        print(f"{len(demand.overloaded)} of 1000 overloaded: {least_s * 1e3:.2f} ms")
        assert least_s < 0.01 * slowness()
