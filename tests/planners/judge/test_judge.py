"""Laws of the judge: what pays is done, what does not is left alone, and the same looks give the same decisions."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.planners import judged
from pengserve.planners.check import check_switch
from pengserve.planners.columns import ReadyInstances, ready_instances
from pengserve.planners.judge.changes import MANY, MOST, MOST_OF_MANY, Change
from pengserve.planners.judge.forecasts import (
    KEEP,
    MOST_FOLLOWED,
    MOST_TOLD,
    Forecast,
    Forecasts,
    Measured,
    Outcome,
)
from pengserve.planners.judge.judge import DEARER, JudgeHistory, Judgement, judge, pays, pricing_of
from pengserve.planners.judge.prediction import Prediction, Priced
from pengserve.planners.selector import Action, Decision, SelectorHistory, select
from pengserve.planners.types.ages import AGES
from pengserve.planners.types.config import DropConfig, JudgeConfig, MergeConfig
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand
from pengserve.planners.types.step_cost import StepCost
from tests.planners.judge.watching import COST, COSTS, calm_then_burst, served
from tests.support.effort import examples

MERGE, DROP = MergeConfig(), DropConfig(max_stages=4)


def decided(looks: Iterable[ClusterSnapshot], judge: JudgeConfig | None = None) -> tuple[SwitchPlan | None, Decision]:
    """The first switch that is decided on `looks`, or what is decided at the last one."""
    history, plan, decision = SelectorHistory(), None, None
    for seen in looks:
        plan, history, decision = select(seen, MERGE, DROP, history, judge_config=judge or JudgeConfig())
        if plan is not None and decision.is_judged:
            break
    assert decision is not None
    return plan, decision


def what(plan: SwitchPlan | None) -> str:
    return "" if plan is None else f"{plan.verb} {plan.group}"


def test_where_it_is_switched_off_thresholds_decide() -> None:
    _, decision = decided(served(4, rate=0.3, running=1), JudgeConfig(is_on=False))
    assert not decision.is_judged and decision.chosen.prediction is None


def test_at_low_load_instances_merge_because_each_token_comes_sooner() -> None:
    plan, decision = decided(served(4, rate=0.3, running=1))
    assert what(plan) == "merge tp4@(0,1,2,3)"
    assert decision.is_judged and decision.chosen.gain_s > 0 and decision.chosen.prediction is not None


def test_before_the_first_request_instances_that_have_a_price_stay_alone() -> None:
    """Thresholds take them for quiet. Nothing is known of what will come, and a burst would meet a group."""
    plan, decision = decided(served(4, rate=0.0, running=0))
    assert plan is None and not decision.options
    by_rules = SelectorHistory()
    for seen in served(4, rate=0.0, running=0):
        plan, by_rules, _ = select(seen, MERGE, DROP, by_rules, judge_config=JudgeConfig(is_on=False))
    assert what(plan) == "merge tp4@(0,1,2,3)"


def test_a_group_that_stands_before_the_first_request_comes_to_its_end() -> None:
    history = SelectorHistory()
    for seen in served(2, "pp2@(0,1)", rate=0.0, running=0, seconds=60):
        plan, history, _ = select(seen, MERGE, DROP, history)
        if plan is not None:
            break
    assert what(plan) == "restore pp2@(0,1)"


@pytest.mark.parametrize("layout", ["tp2@(0,1) tp2@(2,3)", "tp2@(0,1)"])
def test_groups_that_are_wanted_wider_merge_in_one_switch_and_that_is_what_it_costs(layout: str) -> None:
    looks = list(served(4, layout, rate=0.3, running=1))
    plan, _ = decided(looks)
    assert plan is not None and what(plan) == "merge tp4@(0,1,2,3)" and plan.parts == looks[-1].layout.groups
    history = SelectorHistory()
    for seen in looks:
        _, history, _ = select(seen, MERGE, DROP, history, judge_config=JudgeConfig(is_on=False))
    pricing = pricing_of(seen, ready_instances(seen.instances), JudgeConfig(), DROP, history.judge)
    direct = Change("merge", plan.group, (), plan.parts, (plan.group,))
    detour = direct._replace(verb="split", group=plan.parts[0])
    prices = [priced.price_s for priced in pricing.price([direct, detour])]
    assert 0 < prices[0] < prices[1], "two switches stall twice"


def test_at_high_load_a_group_is_split_because_two_compute_more_than_one() -> None:
    plan, _ = decided(served(2, "tp2@(0,1)", rate=6.0, running=30, waiting=20))
    assert what(plan) == "split tp2@(0,1)"


def test_where_compute_is_short_a_drop_loses_though_memory_is_full() -> None:
    looks = served(2, rate=9.0, prompt=2000, output=50, running=64, waiting=30)
    plan, decision = decided(looks)
    assert plan is None and decision.chosen.action is Action.KEEP
    assert any(option.action is Action.DROP for option in decision.options), "it was considered"
    assert not decision.is_rest, "that it was not done is told"


def test_where_memory_is_short_a_drop_wins() -> None:
    """The batch is small, since there is no room for more; steps take as long for one as for many."""
    plan, _ = decided(served(2, rate=2.0, prompt=1000, output=500, running=6, waiting=12, blocks=256))
    assert what(plan) == "drop pp2@(0,1)"


@pytest.mark.parametrize(("waiting", "redirects", "expected"), [(2, False, True), (2, True, False), (8, True, True)])
def test_no_drop_is_made_for_a_queue_that_can_begin_elsewhere(waiting: int, redirects: bool, expected: bool) -> None:
    """One of two instances is nearly empty, and takes some requests but not many."""
    history, verb = SelectorHistory(), ""
    for seen in served(2, rate=2.0, prompt=1000, output=500, running=6, waiting=waiting, blocks=256, seconds=10.0):
        full, roomy = seen.instances
        stats = replace(roomy.stats, kv_blocks_used=10, num_running=1, num_waiting=0, queued_tokens=0)
        seen = replace(seen, instances=(full, replace(roomy, stats=stats)))
        plan, history, _ = select(seen, MERGE, DROP, history, redirects=redirects)
        if plan is not None:
            verb = plan.verb
            break
    assert (verb == "drop") is expected, verb


def test_a_burst_that_begins_at_once_is_met_by_a_drop_before_memory_is_full() -> None:
    """All of its requests grow alike. It is all there is to see, and began as the layout was released."""
    history, used = SelectorHistory(), 0.0
    for seen in calm_then_burst(14):
        plan, history, _ = select(seen, MERGE, DropConfig(max_stages=2), history)
        used = max(i.stats.kv_blocks_used / i.stats.kv_blocks_total for i in seen.instances)
        if plan is not None:
            break
    assert what(plan) == "drop pp2@(0,1)" and used < 0.75, used


def test_a_burst_that_memory_holds_is_left_alone() -> None:
    history = SelectorHistory()
    for seen in calm_then_burst(4):
        plan, history, _ = select(seen, replace(MERGE, max_degree=1), DropConfig(max_stages=2), history)
        assert plan is None, plan


@pytest.mark.parametrize(("prompt", "expected"), [(300, "restore pp2@(0,1)"), (30_000, "")])
def test_a_pipeline_that_nothing_needs_ends_unless_it_reads_prompts_like_the_last_ones_sooner(
    prompt: int, expected: str
) -> None:
    history, plan = SelectorHistory(), None
    for at, seen in enumerate(served(2, "pp2@(0,1)", rate=0.0, running=0, seconds=8)):
        came = [0 if i.stats.is_follower else 7 for i in seen.instances]
        stats = [
            replace(i.stats, total_requests=count, total_request_tokens=count * prompt)
            for i, count in zip(seen.instances, came, strict=True)
        ]
        idle = tuple(replace(i, stats=s) for i, s in zip(seen.instances, stats, strict=True))
        plan, history, _ = select(replace(seen, instances=idle), MERGE, DROP, history)
        if plan is not None and at > 3:
            break
    assert what(plan) == expected


def test_a_pipeline_that_no_memory_needs_is_restored() -> None:
    slower = StepCost(**{name: 1.4 * getattr(COST, name) for name in COST.__slots__})
    plan, _ = decided(served(2, "pp2@(0,1)", rate=4.0, running=10, costs=dict(COSTS) | {"pp2": slower}))
    assert what(plan) == "restore pp2@(0,1)"


@pytest.mark.parametrize(("running", "is_left"), [(5, True), (1, False)])
def test_a_busy_pipeline_gives_way_to_groups_whose_tokens_come_sooner(running: int, is_left: bool) -> None:
    """It ends in its members, and these merge at once; where few answers run it is kept."""
    load = {"rate": 0.1, "prompt": 300, "output": 400, "running": running}
    history = SelectorHistory()
    for seen in served(4, "pp4@(0,1,2,3)", **load):
        plan, history, decision = select(seen, MERGE, DROP, history)
        if plan is not None and decision.is_judged:
            break
    if not is_left:
        assert all("together" not in option.why for option in decision.options if option.action is Action.RESTORE)
        return
    assert what(plan) == "restore pp4@(0,1,2,3)" and "tp4@(0,1,2,3)" in decision.chosen.why
    restored = next(look for look in served(4, **load) if look.time_s == seen.time_s)
    plan, _, _ = select(replace(restored, time_s=seen.time_s + 0.2), MERGE, DROP, history)
    assert what(plan) == "merge tp4@(0,1,2,3)"


def test_what_requests_need_comes_before_what_pays() -> None:
    looks = [
        replace(seen, demands=(Demand(longest_waiting_tokens=4096 * 32 + 1),))
        for seen in served(4, rate=9.0, prompt=2000, output=50, running=60, waiting=30)
    ]
    plan, _ = decided(looks)
    assert what(plan) == "merge tp2@(0,1)"


def test_a_margin_that_nothing_reaches_keeps_the_layout() -> None:
    plan, decision = decided(served(4, rate=0.3, running=1), JudgeConfig(margin=1.0))
    assert plan is None and len(decision.options) > 1


@settings(max_examples=examples(40))
@given(
    st.sampled_from(["", "tp2@(0,1)", "tp4@(0..3)", "pp2@(0,1)", "pp2@(0,1) tp2@(2,3)"]),
    st.floats(0, 12),
    st.integers(0, 100),
    st.integers(0, 30),
)
def test_decisions_are_lawful_and_the_same_again(layout: str, rate: float, running: int, waiting: int) -> None:
    one = two = SelectorHistory()
    for seen in served(4, layout, rate=rate, running=running, waiting=waiting, seconds=6):
        plan, one, decision = select(seen, MERGE, DROP, one)
        again, two, same = select(seen, MERGE, DROP, two)
        assert (plan, decision) == (again, same)
        if plan is not None:
            assert check_switch(plan, seen) == ()
            assert (decision.chosen.action.value, decision.chosen.group) == (plan.verb, plan.group)


@pytest.mark.parametrize("layout", ["", "tp2@(0,1)", "tp4@(0..3)", "pp4@(0..3)", "pp2@(0,1) tp2@(2,3)"])
def test_no_member_is_left_out_of_what_a_change_leads_to(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its groups run would be left out with it, and half of the load would be gained."""
    changes: list[Change] = []

    def noted(snapshot: ClusterSnapshot, instances: ReadyInstances, found: Sequence[Change], *rest: Any) -> Judgement:
        changes.extend(found)
        return judge(snapshot, instances, found, *rest)

    monkeypatch.setattr(judged, "judge", noted)
    history = SelectorHistory()
    for seen in served(4, layout, rate=0.3, running=1, seconds=4):
        _, history, _ = select(seen, MERGE, DROP, history)
    assert changes
    for change in changes:
        before, after = ([m for g in groups for m in g.members] for groups in (change.before, change.after))
        assert sorted(before) == sorted(after), change


# What it measures


def test_steps_that_take_longer_than_profiled_are_believed() -> None:
    history = SelectorHistory()
    seen = None
    for seen in served(2, rate=2.0, running=20, slow=1.5):
        _, history, _ = select(seen, MERGE, DROP, history)
    assert seen is not None
    costs = history.judge.watched.costs(ready_instances(seen.instances))
    alone = costs.of("dp")
    assert alone is not None and alone.load_s == pytest.approx(1.5 * COST.load_s, rel=0.2)


def test_without_a_profile_steps_are_fitted_and_other_shapes_are_a_share_of_them() -> None:
    history = SelectorHistory()
    seen = None
    for seen in served(2, rate=2.0, running=20, costs={}):
        _, history, _ = select(seen, MERGE, DROP, history)
    assert seen is not None
    costs = history.judge.watched.costs(ready_instances(seen.instances))
    alone, pair = costs.of("dp"), costs.of("tp2")
    assert alone is not None and pair is not None
    held = 20 * 1100
    assert alone.step_s(20, 20, held) == pytest.approx(COST.step_s(20, 20, held), rel=0.3)
    assert alone.step_s(20, 20, held) / 2 < pair.step_s(20, 20, held) < alone.step_s(20, 20, held)


def test_the_rate_and_the_lengths_of_requests_are_those_of_late() -> None:
    history = SelectorHistory()
    for seen in served(4, rate=2.0, prompt=700, output=90):
        _, history, _ = select(seen, MERGE, DROP, history)
    traffic = history.judge.watched.traffic()
    few, expected, many, most = (coming.later for coming in traffic.coming)
    assert few < expected < many <= most and expected == pytest.approx(8.0, rel=0.1)
    assert traffic.prompt_tokens == pytest.approx(700) and traffic.output_tokens == pytest.approx(90, rel=0.1)


def test_requests_that_come_in_bursts_may_come_in_one_again() -> None:
    """As many come as evenly, but all of them in every tenth second."""
    many = []
    for is_even in (True, False):
        history = SelectorHistory()
        for at, seen in enumerate(served(4, rate=4.0, seconds=40)):
            counts = [i.stats.total_requests for i in seen.instances]
            if not is_even:
                counts = [int(4.0 * 10 * (at // 20)) for _ in counts]
            stats = [replace(i.stats, total_requests=c) for i, c in zip(seen.instances, counts, strict=True)]
            seen = replace(
                seen, instances=tuple(replace(i, stats=s) for i, s in zip(seen.instances, stats, strict=True))
            )
            _, history, _ = select(seen, replace(MERGE, is_auto=False), DropConfig(), history)
        _, expected, _, most = (coming.later for coming in history.judge.watched.traffic().coming)
        assert expected == pytest.approx(16.0, rel=0.3)
        many.append(most)
    assert many[1] > 1.3 * many[0], many


def test_a_prompt_is_known_to_be_long_when_it_comes_and_not_when_it_is_read() -> None:
    """A hundred prompts had 100 tokens each; one of 9,000 comes, of which no step has computed anything."""
    history = JudgeHistory()
    for seen in served(2, rate=5.0, prompt=100, seconds=10):
        history = history.seen(seen, ready_instances(seen.instances), JudgeConfig())
    before = history.watched.traffic()
    first, *others = seen.instances
    stats = replace(
        first.stats,
        total_requests=first.stats.total_requests + 1,
        total_request_tokens=first.stats.total_request_tokens + 9000,
    )
    seen = replace(seen, time_s=seen.time_s + 0.5, instances=(replace(first, stats=stats), *others))
    after = history.seen(seen, ready_instances(seen.instances), JudgeConfig()).watched.traffic()
    assert before.pairs < 200 and 3000 < after.pairs < 9000


def test_a_cluster_of_which_no_instance_is_up_is_watched_too() -> None:
    seen = next(iter(served(2, rate=5.0, seconds=2)))
    history = JudgeHistory()
    for at, instances in enumerate(((), (), seen.instances, (), ())):
        look = replace(seen, time_s=seen.time_s + at, instances=instances)
        history = history.seen(look, ready_instances(instances), JudgeConfig()).settled()
    assert not history.watched.costs(ready_instances(())).of("dp")


@pytest.mark.parametrize(("life_s", "expected"), [(0.0, 20.0), (12.0, 20.0), (70.0, 70.0), (900.0, 100.0)])
def test_what_is_predicted_lasts_as_long_as_a_request_lives(life_s: float, expected: float) -> None:
    assert JudgeConfig().horizon(life_s) == expected


def test_before_any_answer_has_ended_none_is_expected_to_be_as_long_as_all_are_together() -> None:
    """Forty requests began together, and have 150 tokens each: 6,000 tokens, and no answer."""
    history = SelectorHistory()
    for seen in calm_then_burst(20, calm_s=0.0):
        _, history, _ = select(seen, MERGE, DROP, history)
    running = [i.stats for i in seen.instances]
    tokens = sum(s.total_generated_tokens for s in running) / sum(s.num_running for s in running)
    output = history.judge.watched.traffic().output_tokens
    assert not any(s.total_finished for s in running)
    assert tokens < output < 2.5 * tokens


def test_answers_that_have_just_begun_do_not_make_those_to_come_shorter() -> None:
    """Answers had 190 tokens each; then a hundred begin at once."""
    history = JudgeHistory()
    for seen in served(2, rate=1.0, output=190):
        history = history.seen(seen, ready_instances(seen.instances), JudgeConfig())
    before = history.watched.traffic().output_tokens
    young = {name: 5 * (1 + at) for at, name in enumerate(AGES)}
    instances = tuple(replace(i, stats=replace(i.stats, num_running=50, **young)) for i in seen.instances)
    seen = replace(seen, time_s=seen.time_s + 0.5, instances=instances)
    after = history.seen(seen, ready_instances(instances), JudgeConfig()).watched.traffic().output_tokens
    assert before == pytest.approx(190, rel=0.1) and after >= 0.99 * before


def test_a_pipeline_whose_requests_have_their_kv_on_the_way_is_not_taken_for_idle() -> None:
    history = SelectorHistory()
    for seen in served(2, "pp2@(0,1)", rate=0.0, running=0, seconds=8):
        leader, other = (replace(i.stats, total_requests=7) for i in seen.instances)
        stats = [replace(leader, num_waiting=40, num_holding=40, kv_blocks_used=4000), other]
        held = tuple(replace(i, stats=s) for i, s in zip(seen.instances, stats, strict=True))
        plan, history, _ = select(replace(seen, instances=held), MERGE, DROP, history)
        assert plan is None, plan


def test_a_group_whose_leader_is_down_is_left_out() -> None:
    """While an instance is replaced the others are steered on."""
    history = SelectorHistory()
    for seen in served(4, rate=4.0, running=30, seconds=8):
        _, history, _ = select(seen, replace(MERGE, max_degree=1), DropConfig(), history)
    groups, up = seen.layout.groups, ready_instances(seen.instances[:1] + seen.instances[2:])
    kept = pricing_of(seen, up, JudgeConfig(), DROP, history.judge).keep(groups)
    assert kept is not None and kept[0] == (groups[0], *groups[2:])


def test_forecasts_that_end_together_become_what_each_would_alone() -> None:
    """They are of groups of different sizes, and of different horizons."""
    history = SelectorHistory()
    for seen in served(4, rate=4.0, running=30, seconds=8):
        _, history, _ = select(seen, replace(MERGE, max_degree=1), DropConfig(), history)
    instances, groups = ready_instances(seen.instances), seen.layout.groups
    pricing = pricing_of(seen, instances, JudgeConfig(), DROP, history.judge)
    begun = []
    for count, horizon_s in ((1, 3.0), (4, 5.0), (2, 5.0)):
        kept = pricing.keep(groups[:count])
        assert kept is not None
        of, rows, predicted = kept
        begun_s = seen.time_s - horizon_s
        begun.append(
            Forecast(
                action=KEEP,
                groups=of,
                rows=rows,
                predicted=predicted,
                made_s=begun_s,
                horizon_s=horizon_s,
                begun_s=begun_s,
                seen_s=begun_s,
            )
        )
    traffic = history.judge.watched.traffic()
    _, together = Forecasts(open=tuple(begun)).seen(seen, instances).settled(traffic)
    alone = [outcome for one in begun for outcome in Forecasts(open=(one,)).seen(seen, instances).settled(traffic)[1]]
    assert len(together) == 3 and len({outcome.error for outcome in together}) == 3
    for one, other in zip(together, alone, strict=True):
        assert one.error == pytest.approx(other.error) and replace(one, error=other.error) == other
    # Where changes are priced at the same look, prices know of these errors already.
    over = Forecasts(open=tuple(begun)).seen(seen, instances)
    wide = Group.parse("tp2@(0,1)")
    changes = [Change("merge", wide, (), groups[:2], (wide,), is_spare=True)]
    beside = pricing_of(seen, instances, JudgeConfig(), DROP, replace(history.judge, forecasts=over))
    priced, outcomes = beside.price(changes, beside=groups), beside.outcomes
    learned, _ = over.settled(traffic)
    after = pricing_of(seen, instances, JudgeConfig(), DROP, replace(history.judge, forecasts=learned))
    assert [outcome.error for outcome in outcomes] == pytest.approx([outcome.error for outcome in together])
    assert not beside.forecasts.over and abs(learned.log_error) > 1e-3
    assert priced[0].gain_s == pytest.approx(after.price(changes)[0].gain_s)
    (kept, kept_after) = beside.keep(groups), after.keep(groups)
    assert kept is not None and kept_after is not None and kept[2].cost_s == pytest.approx(kept_after[2].cost_s)


@pytest.mark.parametrize(
    ("p99_s", "ttft_s", "margins", "expected"),
    [
        (1.0, 0.5, 1.1, True),
        (1.0, 0.5, 0.9, False),
        (1.2, 0.5, 1.1, False),
        (1.2, 0.5, 1.1 * DEARER, True),
        (0.5, 1.2, 1.1, False),
    ],
)
def test_what_makes_the_slowest_first_tokens_later_must_gain_more(
    p99_s: float, ttft_s: float, margins: float, expected: bool
) -> None:
    """A queue that stands counts as well."""
    config, before = JudgeConfig(), Group.parse("dp@(0)")
    change = Change("merge", Group.parse("tp2@(0,1)"), (), (before,), (Group.parse("tp2@(0,1)"),))
    keep = Prediction(cost_s=100.0, ttft_s=0.5, ttft_p99_s=1.0)
    then = Prediction(cost_s=50.0, ttft_s=ttft_s, ttft_p99_s=p99_s)
    gain_s = margins * config.least(keep.cost_s)
    priced = Priced(change=change, keep=keep, then=then, price_s=1.0, gain_s=gain_s, kept_s=keep.cost_s)
    assert pays(priced, {}, config) is expected


def test_what_was_seen_to_gain_for_long_is_not_done_where_it_makes_first_tokens_later() -> None:
    change = Change("merge", Group.parse("tp2@(0,1)"), (), (Group.parse("dp@(0)"),), (Group.parse("tp2@(0,1)"),))
    keep, then = Prediction(cost_s=100.0, ttft_p99_s=1.0), Prediction(cost_s=90.0, ttft_p99_s=1.0)
    priced = Priced(change=change, keep=keep, then=then, price_s=1.0, gain_s=5.0, kept_s=keep.cost_s)
    later = replace(priced, then=replace(then, ttft_p99_s=2.0))
    assert [pays(each, {change.what: 50.0}, JudgeConfig()) for each in (priced, later)] == [True, False]


def outcome_of(shape: str, error: float) -> Outcome:
    """Of a group that stood for long."""
    return Outcome(
        action=KEEP,
        groups=(Group.parse(shape),),
        made_s=0.0,
        predicted=Prediction(),
        measured=Measured(request_s=100.0),
        error=error,
    )


def test_what_the_model_is_wrong_by_is_alike_for_all_shapes_until_two_were_measured() -> None:
    """Answers are longer than expected, which only the shape that stands can show."""
    found = Forecasts()
    for _ in range(50):
        found = found.learned([outcome_of("pp2@(0,1)", 1.4)])
    assert found.correction("pp2") == pytest.approx(1.4, rel=0.01)
    assert 1.05 < found.correction("pp2") / found.correction("dp") < 1.1 and found.correction("dp") > 1.25


def test_a_shape_that_is_worse_than_predicted_is_found_out() -> None:
    found = Forecasts()
    for _ in range(50):
        found = found.learned([outcome_of("pp2@(0,1)", 1.4), outcome_of("dp@(0)", 1.0)])
    assert found.correction("pp2") / found.correction("dp") == pytest.approx(1.4, rel=0.1)


def test_a_forecast_is_held_against_what_became_of_it() -> None:
    history, outcomes = SelectorHistory(), []
    for seen in served(4, rate=4.0, running=30, seconds=40):
        _, history, decision = select(seen, replace(MERGE, max_degree=1), DROP, history)
        outcomes += decision.outcomes
    assert outcomes == [] or all(outcome.error > 0 for outcome in outcomes)


@pytest.mark.parametrize(("num_instances", "most"), [(MANY, MOST), (MANY + 8, MOST_OF_MANY)])
def test_of_very_many_instances_fewer_groups_are_priced(num_instances: int, most: int) -> None:
    """Of those that only make use of spare compute: the idlest of many are alike, and a look must not take longer."""
    _, decision = decided(served(num_instances, rate=0.3, running=1, seconds=2))
    shapes = [option.group.shape for option in decision.options if option.group is not None]
    assert decision.is_judged
    assert {shape: shapes.count(shape) for shape in ("tp2", "tp4", "pp2", "pp4")} == {
        "tp2": most, "tp4": most, "pp2": most, "pp4": most
    }  # fmt: skip


def forecasts_of(count: int) -> tuple[Forecasts, ClusterSnapshot, JudgeHistory]:
    """So many forecasts of one group each, which stand at the last look."""
    history = SelectorHistory()
    for seen in served(4, rate=4.0, running=30, seconds=8):
        _, history, _ = select(seen, replace(MERGE, max_degree=1), DropConfig(), history)
    instances, groups = ready_instances(seen.instances), seen.layout.groups
    kept = pricing_of(seen, instances, JudgeConfig(), DROP, history.judge).keep(groups[:1])
    assert kept is not None
    of, rows, predicted = kept
    one = Forecast(action="split", groups=of, rows=rows, predicted=predicted, made_s=seen.time_s, horizon_s=5.0)
    return Forecasts(open=(one,) * count), seen, history.judge


def test_of_many_changes_at_once_the_first_are_followed() -> None:
    forecasts, seen, _ = forecasts_of(MOST_FOLLOWED + 3)
    begun = forecasts.seen(seen, ready_instances(seen.instances))
    assert len(begun.open) == MOST_FOLLOWED
    assert all(forecast.begun_s == seen.time_s for forecast in begun.open)
    waiting = replace(begun, open=(*begun.open, forecasts.open[0]))
    assert len(waiting.seen(seen, ready_instances(seen.instances)).open) == MOST_FOLLOWED


def test_a_forecast_counts_preempted_requests_as_running() -> None:
    forecasts, seen, _ = forecasts_of(1)
    begun = forecasts.seen(seen, ready_instances(seen.instances))
    leader = begun.open[0].leaders[0]

    def after(num_preempted: int) -> Measured:
        instances = tuple(
            replace(one, stats=replace(one.stats, num_running=4, num_waiting=5, num_preempted=num_preempted))
            if one.key.instance_id == leader and one.stats is not None
            else one
            for one in seen.instances
        )
        later = replace(seen, time_s=seen.time_s + 2.0, instances=instances)
        return begun.seen(later, ready_instances(instances)).open[0].measured

    assert (after(0).queue, after(0).run_s, after(0).wait_s) == (5, 8.0, 10.0)
    assert (after(3).queue, after(3).run_s, after(3).wait_s) == (2, 14.0, 4.0)


def test_a_look_tells_few_outcomes_and_the_next_ones_tell_the_rest() -> None:
    forecasts, seen, history = forecasts_of(MOST_TOLD + 2)
    instances, traffic = ready_instances(seen.instances), history.watched.traffic()
    later = replace(seen, time_s=seen.time_s + 6.0)
    over = forecasts.seen(seen, instances).seen(later, ready_instances(later.instances))
    assert len(over.over) == MOST_TOLD + 2 and not over.open
    rest, told = over.settled(traffic)
    assert len(told) == MOST_TOLD and len(rest.over) == 2
    rest, told = rest.settled(traffic)
    assert len(told) == 2 and not rest.over and rest.settled(traffic) == (rest, ())
