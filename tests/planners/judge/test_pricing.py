"""What a price takes into account: whether a pipeline is for memory, and requests whose KV is on its way."""

from dataclasses import replace

import pytest

from pengserve.planners.columns import ready_instances
from pengserve.planners.judge.changes import Change
from pengserve.planners.judge.group_state import GroupState, GroupStates
from pengserve.planners.judge.judge import JudgeHistory, pricing_of
from pengserve.planners.judge.pricing import Pricing
from pengserve.planners.judge.row_table import RowTable
from pengserve.planners.types.config import DropConfig, JudgeConfig
from pengserve.planners.types.layout import Group
from pengserve.planners.types.step_cost import StepCost
from tests.planners.judge.watching import BLOCKS, COST, COSTS, served

PIPELINE, WIDE = Group.parse("pp2@(0,1)"), Group.parse("tp2@(0,1)")
ROOM = 160  # blocks that each instance uses, at most: memory is never short now


def gained_s(goal: Group, blocks: int) -> float:
    """Request-seconds that two instances gain as `goal`, for which prompts take more than half of the time."""
    history = JudgeHistory()
    for seen in served(2, rate=5.0, output=500, running=4, blocks=blocks):
        instances = ready_instances(seen.instances)
        history = history.seen(seen, instances, JudgeConfig())
    assert all(instance.stats.kv_blocks_used < ROOM for instance in seen.instances)
    pricing = pricing_of(seen, instances, JudgeConfig(), DropConfig(max_stages=2), history)
    change = Change("merge", goal, (), seen.layout.groups, (goal,), is_spare=True)
    (priced,) = pricing.price([change])
    return priced.gain_s


def test_a_pipeline_is_for_memory_once_memory_will_run_out() -> None:
    """Prompts may take most of its time then, which they may not where it only makes use of spare compute."""
    assert gained_s(PIPELINE, blocks=3 * ROOM) > 0
    assert gained_s(PIPELINE, blocks=BLOCKS) <= 0


def test_a_tensor_parallel_group_is_never_for_memory() -> None:
    assert gained_s(WIDE, blocks=3 * ROOM) <= 0


@pytest.mark.parametrize(("load", "rate", "is_formed"), [(0.6, 4.0, True), (0.9, 4.0, False), (0.9, 3.0, True)])
def test_prompts_may_take_less_of_a_groups_time_where_its_tokens_come_little_sooner(
    load: float, rate: float, is_formed: bool
) -> None:
    """`load` times as long as an instance alone it takes a step to read the weights; at 4 requests/s of each instance
    prompts take between 40 and 50 % of the group's time."""
    wide = StepCost(**{name: getattr(COST, name) * 0.45 for name in COST.__slots__})
    costs = {**COSTS, "tp2": replace(wide, load_s=COST.load_s * load)}
    history = JudgeHistory()
    for seen in served(2, rate=rate, output=50, costs=costs):
        instances = ready_instances(seen.instances)
        history = history.seen(seen, instances, JudgeConfig())
    pricing = pricing_of(seen, instances, JudgeConfig(), DropConfig(max_stages=2), history)
    (priced,) = pricing.price([Change("merge", WIDE, (), seen.layout.groups, (WIDE,), is_spare=True)])
    assert priced.then.tpot_s < priced.keep.tpot_s and priced.then.ttft_s < priced.keep.ttft_s
    assert bool(priced.gain_s > 0) == is_formed


def test_the_rest_of_a_prompt_that_is_read_waits() -> None:
    """Of two that run one decodes, and of the other's prompt a quarter is read. A third one waits."""
    history = JudgeHistory()
    for seen in served(2, rate=2.0, prompt=800, running=2):
        history = history.seen(seen, ready_instances(seen.instances), JudgeConfig())
    first, other = seen.instances
    stats = replace(first.stats, num_running=2, num_waiting=1, queued_tokens=800, prefilling_tokens=600)
    instances = ready_instances((replace(first, stats=stats), other))
    state = GroupStates(seen, instances, history.watched.traffic()).now(Group.parse("dp@(0)"))
    assert (state.running, state.waiting, state.waiting_tokens) == (1.25, 1.75, 1400)


@pytest.mark.parametrize(("num_requests", "since_s", "expected"), [(1, 0.1, True), (5, 4.9, False), (5, 5.0, True)])
@pytest.mark.parametrize("prompt", [100, 8000])
def test_a_group_waits_until_more_is_known_only_where_it_could_be_in_the_way(
    prompt: int, num_requests: int, since_s: float, expected: bool
) -> None:
    """The first instance reads a prompt, and decodes what else there is; the others stand idle."""
    history = JudgeHistory()
    for seen in served(4, rate=0.01, prompt=prompt, running=0):
        history = history.seen(seen, ready_instances(seen.instances), JudgeConfig())
    first, *others = seen.instances
    stats = replace(first.stats, num_running=num_requests, prefilling_tokens=prompt, kv_blocks_used=num_requests)
    instances = ready_instances((replace(first, stats=stats), *others))
    traffic = replace(history.watched.traffic(), since_s=since_s)
    costs, config = history.watched.costs(instances), JudgeConfig()
    pricing = Pricing(seen, instances, traffic, costs, history.switches, config, 1e10)
    goal = Group.parse("pp4@(0..3)") if prompt > 1000 else Group.parse("tp4@(0..3)")
    (priced,) = pricing.price([Change("merge", goal, (), seen.layout.groups, (goal,), is_spare=True)])
    assert bool(priced.gain_s > config.least(priced.keep.cost_s)) == expected


@pytest.mark.parametrize(("goal", "is_less"), [("pp4@(0..3)", True), ("tp4@(0..3)", False)])
def test_the_margin_is_of_what_keeping_costs_at_the_load_that_the_gain_is_of(goal: str, is_less: bool) -> None:
    """A gain that grows with the load counts half as much at few requests; a tensor-parallel group must gain more."""
    history = JudgeHistory()
    for seen in served(4, rate=0.05, prompt=8000, running=0):
        history = history.seen(seen, ready_instances(seen.instances), JudgeConfig())
    first, *others = seen.instances
    stats = replace(first.stats, num_waiting=1, queued_tokens=8000)
    instances = ready_instances((replace(first, stats=stats), *others))
    costs, traffic = history.watched.costs(instances), history.watched.traffic()
    pricing = Pricing(seen, instances, traffic, costs, history.switches, JudgeConfig(), 1e10)
    group = Group.parse(goal)
    (priced,) = pricing.price([Change("merge", group, (), seen.layout.groups, (group,), is_spare=True)])
    assert 0.0 < priced.kept_s <= priced.keep.cost_s
    assert (priced.kept_s < priced.keep.cost_s) == is_less


def test_requests_that_hold_kv_run_and_those_that_are_parked_wait() -> None:
    """Two run, three have their KV on its way after a drop, one is parked, and four hold none."""
    *_, seen = served(2, "pp2@(0,1)", rate=2.0, running=2)
    history = JudgeHistory()
    for look in served(2, "pp2@(0,1)", rate=2.0, running=2):
        history = history.seen(look, ready_instances(look.instances), JudgeConfig())
    leader, follower = seen.instances
    stats = replace(leader.stats, num_running=2, num_waiting=8, num_holding=3, num_parked=1)
    instances = ready_instances((replace(leader, stats=stats), follower))
    state = GroupStates(seen, instances, history.watched.traffic()).now(PIPELINE)
    assert (state.running, state.waiting) == (5, 5)


def test_groups_that_are_alike_are_one_row() -> None:
    """Most instances of a quiet cluster are; what the model predicts of one holds for all."""
    history = JudgeHistory()
    for seen in served(8, rate=0.3, running=0):
        instances = ready_instances(seen.instances)
        history = history.seen(seen, instances, JudgeConfig())
    table = RowTable(instances, history.watched.traffic(), history.watched.costs(instances), JudgeConfig())
    idle, busy, pair = GroupState(), GroupState(running=1.0), Group.parse("tp2@(6,7)")
    first = [table.add(group, idle, 0.0, 8) for group in seen.layout.groups]
    others = [table.add(seen.layout.groups[0], busy, 0.0, 8), table.add(pair, idle, 0.0, 8)]
    others += [table.add(seen.layout.groups[0], idle, 0.5, 8), table.add(seen.layout.groups[0], idle, 0.0, 7)]
    assert first == [0] * 8 and others == [1, 2, 3, 4]
    assert all(len(fate.cost_s) == 5 for fate in table.fates())


def test_costs_alone_are_those_of_prices() -> None:
    """Of two changes of the same groups, and of one that cannot be predicted: nothing is known of a third instance."""
    history = JudgeHistory()
    for seen in served(2, rate=2.0, running=3):
        instances = ready_instances(seen.instances)
        history = history.seen(seen, instances, JudgeConfig())
    unknown = Group.parse("tp2@(1,2)")
    changes = [Change("merge", goal, (), seen.layout.groups, (goal,)) for goal in (WIDE, PIPELINE)]
    changes.append(Change("merge", unknown, (), (unknown,), (unknown,)))
    pricing, beside = (pricing_of(seen, instances, JudgeConfig(), DropConfig(max_stages=2), history) for _ in range(2))
    prices = [(priced.change, priced.keep.cost_s, priced.then.cost_s) for priced in pricing.price(changes)]
    costs = beside.costs_s(changes)
    assert [change for change, *_ in costs] == [change for change, *_ in prices] == changes[:2]
    for (_, *kept_and_then), (_, *expected) in zip(costs, prices, strict=True):
        assert kept_and_then == pytest.approx(expected)
    assert beside.costs_s(changes[2:]) == []
