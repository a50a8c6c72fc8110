"""Laws of predicted memory demand: what counts, how growth is seen in time, and what noise does not do."""

import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.overload import MIN_GAP_S, DemandHistory, DemandTrend, GroupDemand, MemoryDemand, predict_demand
from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand, InstanceStats
from tests.planners.clusters import BLOCK_SIZE, NUM_BLOCKS, SLOTS, T0_S, pipeline_capacity, snapshot, stats
from tests.support.speed import slowness

CONFIG = DropConfig(max_stages=4)
TICK_S = 0.5


def predicted(seen: ClusterSnapshot, history: DemandHistory | None = None) -> MemoryDemand:
    return predict_demand(seen, CONFIG, history or DemandHistory())[0]


def of(seen: ClusterSnapshot, member: int = 0) -> GroupDemand:
    return predicted(seen).by_member[InstanceId(member)]


def looks(loads: list[InstanceStats], tick_s: float = TICK_S) -> list[MemoryDemand]:
    """What is predicted at each look, for one instance with these `loads` one after the other."""
    history, found = DemandHistory(), []
    seen = snapshot(1, max_stages=4)
    for i, load in enumerate(loads):
        look = replace(seen, time_s=T0_S + i * tick_s, instances=(replace(seen.instances[0], stats=load),))
        demand, history = predict_demand(look, CONFIG, history)
        found.append(demand)
    return found


# What counts


@given(st.integers(0, NUM_BLOCKS), st.integers(0, 40), st.integers(0, SLOTS))
def test_demand_is_what_runs_and_what_waits(blocks: int, queued: int, waiting: int) -> None:
    load = stats("dp", 0, waiting, blocks, queued_tokens=queued * BLOCK_SIZE if waiting else 0)
    demand = of(snapshot(2, loads={0: load}))
    assert (demand.resident_blocks, demand.growth_blocks) == (blocks, 0)
    assert demand.demand_blocks == blocks + (queued if waiting else 0)
    assert demand.share == demand.demand_blocks / NUM_BLOCKS


@given(st.integers(0, SLOTS), st.integers(1, 100))
def test_only_the_head_of_a_queue_that_slots_would_take_counts(running: int, waiting: int) -> None:
    load = stats("dp", running, waiting, queued_tokens=waiting * BLOCK_SIZE)
    assert of(snapshot(1, loads={0: load})).queued_blocks == min(waiting, SLOTS - running)


def test_a_group_is_measured_in_its_own_shape() -> None:
    loads = {0: stats("tp2", 1, blocks=10), 2: stats("pp2", 1, blocks=100)}
    seen = snapshot(4, "tp2@(0,1) pp2@(2,3)", loads, max_stages=2)
    tp, pp = of(seen, 0), of(seen, 2)
    assert (tp.resident_blocks, tp.capacity_blocks) == (20, 2 * NUM_BLOCKS), "a tp2 block is two of dp"
    assert (pp.resident_blocks, pp.capacity_blocks) == (100, pipeline_capacity(2).num_blocks)
    assert of(seen, 1) is not tp and of(seen, 1) == tp and of(seen, 3) == pp


@pytest.mark.parametrize("load", [stats("tp2", 30, 9, 64), stats("dp", 30, 9, 64, is_follower=True)])
def test_stats_of_another_shape_say_nothing(load: InstanceStats) -> None:
    seen = snapshot(2, loads={0: load})
    assert not of(seen).is_known
    assert predicted(seen).overloaded == ()


def test_a_group_with_a_member_that_is_not_ready_has_no_demand() -> None:
    seen = snapshot(4, "pp2@(0,1)", {0: stats("pp2", 9, blocks=200)}, without=[InstanceId(1)], max_stages=2)
    assert set(predicted(seen).by_member) == {2, 3}


@given(st.integers(0, 100), st.integers(1, 8))
def test_requests_at_ingresses_count_as_long_as_others_are(waiting: int, blocks_each: int) -> None:
    loads = {i: stats("dp", 4, blocks=4 * blocks_each) for i in range(2)}
    seen = snapshot(2, loads=loads, demands=[Demand(num_waiting=waiting)])
    assert [of(seen, i).queued_blocks for i in range(2)] == pytest.approx([waiting * blocks_each / 2] * 2, abs=1)


def test_a_request_that_is_too_long_asks_for_a_shape_and_for_no_memory() -> None:
    loads = {0: stats("dp", 1, blocks=60)}
    seen = snapshot(1, loads=loads, demands=[Demand(num_waiting=9, longest_waiting_tokens=9999)])
    assert of(seen).queued_blocks == 0


# Growth


@given(st.integers(1, 12), st.integers(0, 20))
def test_steady_growth_is_seen_before_the_first_preemption(blocks_per_tick: int, start: int) -> None:
    """Memory fills block by block; vLLM preempts where it is full."""
    used = list(range(start, NUM_BLOCKS + 1, blocks_per_tick))
    found = looks([stats("dp", 8, blocks=blocks) for blocks in used])
    if len(used) >= 5:
        assert found[-1].overloaded
        assert found[-1].by_member[InstanceId(0)].growth_blocks == round(blocks_per_tick / TICK_S * CONFIG.horizon_s)


@given(st.lists(st.integers(0, NUM_BLOCKS), min_size=1, max_size=12))
def test_growth_is_never_negative_and_never_beyond_the_steepest_rise(used: list[int]) -> None:
    rise = max([0, *(b - a for a, b in pairwise(used))])
    for demand in looks([stats("dp", 8, blocks=blocks) for blocks in used]):
        growth = demand.by_member[InstanceId(0)].growth_blocks
        assert 0 <= growth <= round(rise / TICK_S * CONFIG.horizon_s)


@given(st.integers(0, 30), st.integers(30, NUM_BLOCKS), st.integers(4, 10))
def test_one_arrival_is_no_trend(before: int, after: int, num_looks: int) -> None:
    loads = [stats("dp", 1, blocks=before)] * num_looks + [stats("dp", 2, blocks=after)]
    assert looks(loads)[-1].by_member[InstanceId(0)].growth_blocks == 0


@given(st.integers(0, NUM_BLOCKS))
def test_what_stays_does_not_grow(blocks: int) -> None:
    assert all(d.by_member[InstanceId(0)].growth_blocks == 0 for d in looks([stats("dp", 1, blocks=blocks)] * 20))


@given(st.lists(st.integers(0, NUM_BLOCKS), min_size=3, max_size=5))
def test_what_came_and_went_again_does_not_grow(used: list[int]) -> None:
    used[-1] = min(used[0], used[-1])
    assert looks([stats("dp", 8, blocks=blocks) for blocks in used])[-1].by_member[InstanceId(0)].growth_blocks == 0


def test_a_queue_that_grows_counts_as_memory_that_grows() -> None:
    loads = [stats("dp", 4, n, 20, queued_tokens=n * 2 * BLOCK_SIZE) for n in range(8)]
    assert looks(loads)[-1].by_member[InstanceId(0)].growth_blocks == 4


def test_looks_in_a_burst_of_news_count_once() -> None:
    _, history = predict_demand(snapshot(1), CONFIG, DemandHistory())
    seen = snapshot(1, loads={0: stats("dp", 1, blocks=9)}, time_s=T0_S + MIN_GAP_S / 2)
    assert predict_demand(seen, CONFIG, history)[1] == history


def test_another_layout_begins_anew() -> None:
    alone = [snapshot(2, loads={0: stats("dp", 8, blocks=b)}, time_s=T0_S + i / 2) for i, b in enumerate((1, 20, 40))]
    history = DemandHistory()
    for seen in alone:
        _, history = predict_demand(seen, CONFIG, history)
    pair = snapshot(2, "pp2@(0,1)", {0: stats("pp2", 8, blocks=60)}, time_s=T0_S + 2, max_stages=2)
    demand, history = predict_demand(pair, CONFIG, history)
    assert demand.by_member[InstanceId(0)].growth_blocks == 0
    assert list(history.trends.values()) == [DemandTrend(Group.parse("pp2@(0,1)"), ((T0_S + 2, 60),))]


def test_unknown_stats_leave_the_trail_as_it_is() -> None:
    _, history = predict_demand(snapshot(1), CONFIG, DemandHistory())
    stale = snapshot(1, loads={0: stats("tp2")}, time_s=T0_S + 1)
    assert predict_demand(stale, CONFIG, history)[1] == history


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), min_size=1, max_size=8))
def test_the_same_looks_predict_the_same(loads: list[tuple[int, int]]) -> None:
    given_loads = [stats("dp", 1, w, b, queued_tokens=w * BLOCK_SIZE) for b, w in loads]
    first, second = looks(given_loads), looks(given_loads)
    assert first == second and [d.overloaded for d in first] == [d.overloaded for d in second]


def test_a_thousand_instances_are_predicted_in_milliseconds() -> None:
    """Aim: 10 ms. The bound leaves room for a busy machine."""
    history, durations_s = DemandHistory(), []
    for i in range(10):
        loads = {j: stats("dp", 8, blocks=10 + (i * j) % 40) for j in range(1000)}
        seen = snapshot(1000, loads=loads, time_s=T0_S + i * TICK_S, max_stages=4)
        start_s = time.thread_time()
        _, history = predict_demand(seen, CONFIG, history)
        durations_s.append(time.thread_time() - start_s)
    print(f"{min(durations_s[5:]) * 1e3:.1f} ms")
    assert min(durations_s[5:]) < 0.1 * slowness()
