"""When load merges and splits, and that nothing flaps."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.planners.merge.history import LoadHistory, Reason
from pengserve.planners.types.layout import Group
from tests.planners.clusters import T0_S, VirtualCluster, plan_switch, snapshot, stats
from tests.planners.merges import CONFIG, DWELL_S, QUIET_S, plan, running_group, what
from tests.support.effort import examples


@pytest.mark.parametrize("num_instances", [2, 4, 8])
def test_low_load_leads_to_tp_and_a_burst_to_dp_within_a_tick(num_instances: int) -> None:
    burst = 16 * num_instances

    def requests(t_s: float) -> int:
        return burst if 20 <= t_s < 40 else 1

    cluster = VirtualCluster(num_instances, requests).run(80)
    widest = min(4, num_instances)
    assert f"tp{widest}" in cluster.shape_at(QUIET_S + DWELL_S)
    num_groups = num_instances // widest
    assert cluster.shape_at(20 + cluster.tick_s * (num_groups - 1)) == ""
    assert cluster.shape_at(39) == ""
    assert f"tp{widest}" in cluster.shape_at(40 + QUIET_S + DWELL_S)
    assert len(cluster.switches) == 3 * num_groups


def test_a_burst_right_after_a_merge_does_not_wait_for_the_dwell() -> None:
    cluster = VirtualCluster(2, lambda t_s: 40 if t_s >= 3.5 else 1).run(10)
    merged_s, split_s = (at_s for at_s, _ in cluster.switches)
    assert merged_s == QUIET_S and split_s == 3.5


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from([0, 1, 2, 5, 9, 17, 40, 100]), min_size=10, max_size=120),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1.0, 5.0, 10.0]),
)
def test_load_turns_the_layout_at_most_once_in_a_dwell(trace: list[int], num_instances: int, dwell_s: float) -> None:
    """Whatever the load does, at each tick anew."""
    cluster = VirtualCluster(num_instances, lambda t_s: trace[int(t_s * 2)], replace(CONFIG, min_dwell_s=dwell_s))
    cluster.run(len(trace) / 2)
    last_relief_s: float | None = None
    turns = 0
    for (at_s, found), (_, before) in zip(cluster.switches[1:], cluster.switches, strict=False):
        if before.is_merge is False and "wait" in before.why:
            last_relief_s = next(s for s, p in cluster.switches if p is before)
        if found.is_merge and last_relief_s is not None:
            assert at_s - last_relief_s >= dwell_s
        turns += found.is_merge and not before.is_merge
    assert turns <= 1 + len(trace) / 2 / min(dwell_s, QUIET_S + dwell_s)


def test_a_load_that_comes_and_goes_turns_the_layout_once_in_a_dwell() -> None:
    config = replace(CONFIG, min_dwell_s=10.0)
    cluster = VirtualCluster(2, lambda t_s: 40 if t_s % 3.5 < 0.5 else 0, config).run(100)
    merges = [at_s for at_s, found in cluster.switches if found.is_merge]
    assert len(merges) >= 5
    assert all(later - at_s >= 10.0 for later, at_s in zip(merges[1:], merges, strict=False))


@given(st.integers(0, 200), st.sampled_from([2, 4, 8]))
@settings(max_examples=examples(40))
def test_steady_load_comes_to_rest(num_requests: int, num_instances: int) -> None:
    cluster = VirtualCluster(num_instances, lambda _: num_requests).run(60)
    assert all(at_s < 30 for at_s, _ in cluster.switches)
    again = VirtualCluster(num_instances, lambda _: num_requests, groups=cluster.groups).run(60)
    assert again.switches == []


def test_an_arrival_between_two_steps_is_no_queue() -> None:
    for waiting, layout in ((1, "tp2@(0,1)"), (0, "tp2@(0,1)")):
        seen = snapshot(2, layout, {0: stats("tp2", 1, waiting)}, degrees=(2,))
        assert plan(seen) is None
    seen = snapshot(2, "tp2@(0,1)", {0: stats("tp2", 1, 1)}, degrees=(2,))
    _, history = plan_switch(seen, CONFIG, LoadHistory())
    assert what(plan(replace(seen, time_s=T0_S + 0.5), history)) == "split tp2@(0,1)"


def test_a_queue_longer_than_the_group_is_wide_is_one_at_first_sight() -> None:
    assert what(plan(snapshot(2, "tp2@(0,1)", {0: stats("tp2", 1, 3)}, degrees=(2,)))) == "split tp2@(0,1)"


def test_a_new_group_is_not_split_before_its_load_has_arrived() -> None:
    seen = snapshot(2, "tp2@(0,1)", {0: stats("tp2", 1, 30)}, degrees=(2,))
    assert plan(seen, running_group("tp2@(0,1)", Reason.LOAD, T0_S - 0.5)) is None


@pytest.mark.parametrize(("blocks", "is_low"), [(12, True), (20, False)])
def test_memory_counts_as_the_merged_group_would_see_it(blocks: int, is_low: bool) -> None:
    loads = {i: stats("dp", 1, 0, blocks) for i in range(2)}  # of 64 blocks each
    pair = snapshot(2, "", loads, degrees=(2,)).groups[0]
    history = LoadHistory(low_since_s={pair: T0_S - 3}, seen_s=T0_S - 0.5)
    assert (plan(snapshot(2, "", loads, degrees=(2,)), history) is not None) == is_low


def test_a_sole_request_is_best_served_by_all() -> None:
    assert plan(snapshot(2, "tp2@(0,1)", {0: stats("tp2", 1, 0, 60)}, degrees=(2,))) is None


def test_idle_pairs_become_a_group_of_four() -> None:
    pairs = tuple(Group.parse(text) for text in ("tp2@(0,1)", "tp2@(2,3)"))
    cluster = VirtualCluster(4, lambda _: 0, groups=pairs).run(20)
    assert [what(found) for _, found in cluster.switches] == ["merge tp4@(0,1,2,3)"]
    assert cluster.switches[0][1].parts == pairs
    assert cluster.switches[0][0] == DWELL_S


def test_a_merge_says_why_in_figures() -> None:
    cluster = VirtualCluster(2, lambda _: 2).run(5)
    assert cluster.switches[0][1].why == "load: load 0.12 < 0.25 for 2.0 s"
    assert cluster.switches[0][1].plan_id == "0:merge:tp2@(0,1)"


def test_hard_for_load_merges_idle_members_alone() -> None:
    config = replace(CONFIG, load_strategy="hard")
    assert VirtualCluster(2, lambda _: 1, config).run(20).switches == []
    assert len(VirtualCluster(2, lambda _: 0, config).run(20).switches) == 1


def test_stale_stats_neither_split_nor_merge() -> None:
    assert plan(snapshot(2, "tp2@(0,1)", {0: stats("dp", 32, 99, 64)}, degrees=(2,))) is None
