"""Who gets a group from the merge planner, and for how long: long and urgent requests, and wishes for a shape."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.load import ClusterView
from pengserve.planners.merge.history import LoadHistory, Reason, StandingGroup
from pengserve.planners.merge.propose import propose
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.planners.urgency import AnyGroup
from tests.planners.clusters import DP_TOKENS, T0_S, VirtualCluster, plan_switch, snapshot, stats
from tests.planners.merges import CONFIG, DWELL_S, plan, running_group, snapshots, what

# Long context


@given(st.integers(DP_TOKENS + 1, 8 * DP_TOKENS), st.lists(st.integers(0, 20), min_size=8, max_size=8))
def test_a_long_request_gets_the_narrowest_group_that_holds_it_on_the_least_loaded(
    num_tokens: int, requests: list[int]
) -> None:
    loads = {i: stats("dp", n) for i, n in enumerate(requests)}
    seen = snapshot(8, "", loads, demands=[Demand(longest_waiting_tokens=num_tokens)], degrees=(2, 4, 8))
    found = plan(seen)
    assert found is not None and found.is_merge
    assert found.group.degree == next(d for d in (2, 4, 8) if d * DP_TOKENS >= num_tokens)
    taken = sum(requests[m] for m in found.group.members)
    same = [g for g in seen.groups if g.degree == found.group.degree]
    assert taken == min(sum(requests[m] for m in g.members) for g in same)


def test_a_route_that_holds_the_long_request_is_enough_and_stays() -> None:
    busy = {0: stats("tp2", 30, 9, 64)}
    seen = snapshot(2, "tp2@(0,1)", busy, demands=[Demand(longest_waiting_tokens=DP_TOKENS + 1)], degrees=(2,))
    assert plan(seen) is None
    assert what(plan(replace(seen, demands=()))) == "split tp2@(0,1)"


@pytest.mark.parametrize("layout", ["tp2@(0,1) tp2@(2,3)", "tp2@(2,3)", ""])
def test_a_wider_need_is_met_in_one_switch(layout: str) -> None:
    found = plan(snapshot(4, layout, demands=[Demand(longest_waiting_tokens=3 * DP_TOKENS)]))
    assert what(found) == "merge tp4@(0,1,2,3)"
    assert found is not None and {Group.parse(name) for name in layout.split()} <= set(found.parts)


def test_groups_that_keep_requests_paused_are_split_before_a_wider_one() -> None:
    demand = [Demand(longest_waiting_tokens=3 * DP_TOKENS)]
    paused = {1: stats("tp2", 0, num_paused=2)}
    seen = snapshot(4, "tp2@(0,1) tp2@(2,3)", paused, demands=demand)
    assert what(plan(seen)) == "split tp2@(0,1)"


@pytest.mark.parametrize("layout", ["tp2@(0,1)", "tp2@(0,1) tp2@(2,3)"])
def test_a_group_that_a_long_request_needs_grows_for_a_longer_one(layout: str) -> None:
    """It could not be split first."""
    loads = {0: stats("tp2", 1, 0, 60, longest_tokens=DP_TOKENS + 1)}
    seen = snapshot(4, layout, loads, demands=[Demand(longest_waiting_tokens=3 * DP_TOKENS)])
    assert what(plan(seen)) == "merge tp4@(0,1,2,3)"


def test_a_longer_request_waits_for_one_that_runs_where_its_group_cannot_grow() -> None:
    loads = {0: stats("tp2", 1, 0, 60, longest_tokens=DP_TOKENS + 1), 1: stats("tp2", 0, num_paused=1)}
    seen = snapshot(4, "tp2@(0,1)", loads, demands=[Demand(longest_waiting_tokens=3 * DP_TOKENS)])
    assert plan(seen) is None


def test_what_no_group_can_hold_hides_no_shorter_request() -> None:
    demands = [Demand(longest_waiting_tokens=9 * DP_TOKENS), Demand(longest_waiting_tokens=2 * DP_TOKENS)]
    assert what(plan(snapshot(4, demands=demands))) == "merge tp2@(0,1)"


@pytest.mark.parametrize(("age_s", "steps"), [(1.5, ""), (3.0, "split tp2@(0,1)")])
def test_a_long_request_on_its_way_finds_its_group_also_under_overload(age_s: float, steps: str) -> None:
    seen = snapshot(2, "tp2@(0,1)", {0: stats("tp2", 30, 20)}, degrees=(2,))
    assert what(plan(seen, running_group("tp2@(0,1)", Reason.LONG_CONTEXT, T0_S - age_s))) == steps


def test_a_group_for_a_long_request_is_kept_until_that_has_come_and_gone() -> None:
    def demand(t_s: float) -> Demand:
        return Demand(longest_waiting_tokens=DP_TOKENS + 1 if t_s < 1 else 0)

    config = replace(CONFIG, merge_below=0.01)
    cluster = VirtualCluster(2, lambda _: 12, config, demand).run(30)
    assert [(at_s, what(found)) for at_s, found in cluster.switches][:1] == [(0.0, "merge tp2@(0,1)")]
    assert cluster.shape_at(1.5) == "tp2@(0,1)"
    assert cluster.shape_at(30) == ""


# Priority and wishes


@given(snapshots(), st.sampled_from([Demand(num_priority=1), Demand(wanted_degrees=((2, 1),))]))
def test_priority_never_takes_all_instances_from_best_effort(seen: ClusterSnapshot, demand: Demand) -> None:
    instances = tuple(replace(i, stats=replace(i.stats, num_running=3)) for i in seen.instances)
    seen = replace(seen, demands=(demand,), instances=instances)
    found = plan(seen)
    if found is not None and found.is_merge and len(seen.instances) > found.group.degree:
        alone = [g for g in seen.layout.groups if g.kind is GroupKind.DP and g.leader not in found.group.members]
        others = [g for g in seen.layout.groups if g.kind is not GroupKind.DP]
        assert alone or others


def test_an_urgent_request_gets_half_the_cluster_by_hard_preemption() -> None:
    loads = {i: stats("dp", n) for i, n in enumerate([9, 9, 5, 6])}
    found = plan(snapshot(4, "", loads, demands=[Demand(num_priority=1)]))
    assert what(found) == "merge tp2@(2,3)"
    assert found is not None and found.strategy is SwitchStrategy.HARD


def test_with_nobody_left_for_best_effort_its_requests_are_carried() -> None:
    loads = {0: stats("dp", 3), 1: stats("dp", 3)}
    found = plan(snapshot(2, "", loads, demands=[Demand(num_priority=1)], degrees=(2,)))
    assert found is not None and found.is_merge and found.strategy is SwitchStrategy.CARRY
    queues = {i: stats("dp", 32, 20, 60) for i in range(2)}
    assert plan(snapshot(2, "", queues, demands=[Demand(num_priority=1)], degrees=(2,))) is None


def test_two_wishes_that_exclude_each_other_take_no_turns() -> None:
    loads = {i: stats("tp2" if i < 2 else "dp", 0 if i == 1 else 4) for i in range(4)}
    demand = Demand(wanted_degrees=((2, 1), (4, 1)))
    assert plan(snapshot(4, "tp2@(0,1)", loads, demands=[demand])) is None  # the running group serves one of them


def test_wishes_together_leave_an_instance_to_best_effort() -> None:
    loads = {i: stats("dp", 4) for i in range(4)}
    demand = Demand(wanted_degrees=((2, 1), (4, 1)))
    assert plan(snapshot(6, "tp2@(4,5)", loads, demands=[demand])) is None
    assert what(plan(snapshot(6, "tp2@(4,5)", demands=[demand]))) == "merge tp4@(0,1,2,3)"


def test_a_wish_for_dp_splits_and_a_wish_for_tp_merges() -> None:
    seen = snapshot(2, "tp2@(0,1)", demands=[Demand(wanted_degrees=((1, 1),))], degrees=(2,))
    assert what(plan(seen)) == "split tp2@(0,1)"
    seen = snapshot(2, "", demands=[Demand(wanted_degrees=((2, 1),))], degrees=(2,))
    assert what(plan(seen)) == "merge tp2@(0,1)"


def test_a_priority_group_lasts_a_dwell_beyond_the_last_such_request() -> None:
    cluster = VirtualCluster(4, lambda _: 20, demand=lambda t_s: Demand(num_priority=1 if 10 <= t_s < 20 else 0)).run(
        40
    )
    assert [(at_s, found.is_merge) for at_s, found in cluster.switches] == [(10.0, True), (19.5 + DWELL_S, False)]


def test_paused_requests_go_on_when_nothing_needs_the_group() -> None:
    loads = {0: stats("tp2"), 1: stats("tp2", num_paused=1)}
    for reason in Reason:
        seen = snapshot(2, "tp2@(0,1)", loads, degrees=(2,))
        assert what(plan(seen, running_group("tp2@(0,1)", reason))) == "split tp2@(0,1)"


def test_best_effort_overload_wins_over_a_priority_request_in_a_group_of_all() -> None:
    loads = {0: stats("tp4", 32, 40, 60)}
    seen = snapshot(4, "tp4@(0..3)", loads, demands=[Demand(num_priority=1)])
    for reason in (Reason.LOAD, Reason.PRIORITY):
        assert what(plan(seen, running_group("tp4@(0..3)", reason))) == "split tp4@(0,1,2,3)"


# Pipelines


def test_a_pipeline_that_could_be_formed_leads_to_no_merge() -> None:
    demands = [Demand(num_priority=1, wanted_degrees=((2, 3), (4, 1)), longest_waiting_tokens=2 * DP_TOKENS)]
    seen = snapshot(4, "", demands=demands, degrees=(), max_stages=4)
    assert {g.kind for g in seen.groups} == {GroupKind.PP}
    history = LoadHistory()
    for i in range(40):
        found, history = plan_switch(replace(seen, time_s=T0_S + i * 0.5, demands=demands[: i % 2]), CONFIG, history)
        assert found is None


@pytest.mark.parametrize(
    "demand",
    [
        Demand(num_priority=1),
        Demand(wanted_degrees=((2, 1),)),
        Demand(wanted_degrees=((4, 1),)),
        Demand(wanted_degrees=((1, 1),)),
        Demand(longest_waiting_tokens=4 * DP_TOKENS),
        Demand(),
    ],
)
def test_a_pipeline_of_the_layout_is_left_alone(demand: Demand) -> None:
    """Whoever wants its members waits until memory is plenty again."""
    seen = snapshot(4, "pp2@(0,1) pp2@(2,3)", demands=[demand], max_stages=2)
    history = LoadHistory()
    for i in range(40):
        found, history = plan_switch(replace(seen, time_s=T0_S + i * 0.5), CONFIG, history)
        assert found is None


def test_low_load_is_measured_from_the_restore_on() -> None:
    seen = snapshot(4, "pp2@(0,1)", max_stages=2)
    _, history = plan_switch(seen, CONFIG, LoadHistory())
    assert {str(group) for group in history.low_since_s} == {"tp2@(2,3)"}


def test_a_busy_pipeline_of_all_instances_serves_a_wish_for_dp() -> None:
    seen = snapshot(2, "pp2@(0,1)", {0: stats("pp2", 9)}, demands=[Demand(wanted_degrees=((1, 1),))], max_stages=2)
    assert plan(seen) is None


def test_a_long_request_goes_around_a_pipeline() -> None:
    demands = [Demand(longest_waiting_tokens=2 * DP_TOKENS)]
    assert what(plan(snapshot(4, "", demands=demands, max_stages=2))) == "merge tp2@(0,1)"
    narrow = snapshot(4, "pp2@(0,1)", demands=demands, max_stages=2)
    assert plan(narrow) is None, "the pipeline holds it"
    demands = [Demand(longest_waiting_tokens=6 * DP_TOKENS)]
    seen = snapshot(16, "pp2@(0,1)", demands=demands, degrees=(2, 4, 8), max_stages=2)
    assert what(plan(seen)) == "merge tp8@(8,9,10,11,12,13,14,15)"


def test_a_wish_for_dp_is_met_by_a_pipeline() -> None:
    options = [Demand(wanted_degrees=((1, 1),))]
    assert plan(snapshot(4, "tp2@(0,1) pp2@(2,3)", demands=options, max_stages=2)) is None
    assert what(plan(snapshot(4, "tp2@(0,1) tp2@(2,3)", demands=options, max_stages=2))) == "split tp2@(0,1)"


def test_paused_requests_go_on_where_another_group_serves_the_urgent_ones_as_well() -> None:
    """They would wait for as long as urgent requests come."""
    pairs = {Group.parse(text): reason for text, reason in (("tp2@(0,1)", Reason.PRIORITY), ("tp2@(2,3)", Reason.LOAD))}
    loads = {0: stats("tp2", 1, num_paused=2), 2: stats("tp2", 1)}
    seen = snapshot(4, "tp2@(0,1) tp2@(2,3)", loads, demands=[Demand(num_priority=1)], degrees=(2,))

    def found(age_s: float) -> SwitchPlan | None:
        standing = {g: StandingGroup(since_s=T0_S - age_s, reason=reason) for g, reason in pairs.items()}
        history = LoadHistory(running_groups=standing, seen_s=T0_S - 0.5)
        return propose(seen, CONFIG, history, is_judged=True).plan

    assert found(CONFIG.min_dwell_s - 0.5) is None
    assert what(found(CONFIG.min_dwell_s + 0.5)) == "split tp2@(0,1)"


class Harmful(AnyGroup):
    """Says that these groups cost others too much."""

    def __init__(self, *texts: str) -> None:
        self._groups = frozenset(map(Group.parse, texts))

    def harmful(self, view: ClusterView, groups: Sequence[Group]) -> frozenset[Group]:
        """Those of `groups`."""
        return self._groups.intersection(groups)


@pytest.mark.parametrize(
    ("harmful", "kept"), [((), (0, 1)), (("tp2@(0,1)",), (2, 3)), (("tp2@(0,1)", "tp2@(2,3)"), ())]
)
def test_urgent_requests_keep_a_group_that_costs_others_little(harmful: tuple[str, ...], kept: tuple[int, ...]) -> None:
    """The judge may split what they do not keep."""
    seen = snapshot(4, "tp2@(0,1) tp2@(2,3)", demands=[Demand(num_priority=1)], degrees=(2,))
    found = propose(seen, CONFIG, LoadHistory(), is_judged=True, urgency=Harmful(*harmful))
    assert found.plan is None and found.claimed == set(kept)


def test_a_group_that_costs_others_much_is_formed_for_a_wish_alone() -> None:
    every = Harmful("tp2@(0,1)", "tp2@(2,3)")
    urgent, wish = Demand(num_priority=1), Demand(wanted_degrees=((2, 1),))
    for demand, is_formed in ((urgent, False), (wish, True)):
        seen = snapshot(4, "", demands=[demand], degrees=(2,))
        assert bool(propose(seen, CONFIG, LoadHistory(), is_judged=True, urgency=every).plan) == is_formed
