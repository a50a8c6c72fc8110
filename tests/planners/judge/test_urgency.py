"""Urgent requests get groups that have tokens much sooner than an instance alone, and that cost others little."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pengserve.planners.columns import ready_instances
from pengserve.planners.judge.judge import JudgeHistory
from pengserve.planners.judge.urgency import Urgency
from pengserve.planners.load import ClusterView
from pengserve.planners.selector import SelectorHistory, select
from pengserve.planners.types.config import DropConfig, JudgeConfig, MergeConfig
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand
from pengserve.planners.types.step_cost import StepCost
from tests.planners.judge.watching import COST, COSTS, served

DROP, PAIR = DropConfig(max_stages=1), Group.parse("tp2@(0,1)")
# A group of two reads its weights in half of the time, and computes no faster than one instance.
SLOW_READER = replace(COST, load_s=0.5 * COST.load_s)


def looks(costs: dict[str, StepCost], layout: str = "", rate: float = 0.5) -> Iterator[ClusterSnapshot]:
    """One urgent request is in flight at each."""
    for seen in served(4, layout, rate=rate, running=2, costs=dict(COSTS) | costs, seconds=6):
        yield replace(seen, demands=(Demand(num_priority=1),))


def formed(costs: dict[str, StepCost], rate: float = 0.5) -> list[SwitchPlan]:
    """Groups that are formed once it is known what steps cost."""
    history, plans = SelectorHistory(), []
    for seen in looks(costs, rate=rate):
        plan, history, _ = select(seen, MergeConfig(), DROP, history)
        if plan is not None and plan.is_merge and history.judge.knows(ready_instances(seen.instances)):
            plans.append(plan)
    return plans


@pytest.mark.parametrize(("factor", "is_slow"), [(0.5, False), (0.78, False), (0.9, True), (1.4, True)])
def test_urgent_requests_get_a_group_only_where_it_has_tokens_much_sooner(factor: float, is_slow: bool) -> None:
    wide = StepCost(**{name: factor * getattr(COST, name) for name in COST.__slots__})
    plans = formed({"tp2": wide, "tp4": wide})
    assert bool(plans) != is_slow, plans


def is_harmful(layout: str, rate: float) -> bool:
    """Whether a group that reads prompts slowly is, which stands or could be formed."""
    history, config = JudgeHistory(), JudgeConfig()
    for seen in looks({"tp2": SLOW_READER}, layout, rate):
        instances = ready_instances(seen.instances)
        history = history.seen(seen, instances, config)
    return PAIR in Urgency(seen, instances, config, DROP, history).harmful(ClusterView.of(seen, 64), [PAIR])


@pytest.mark.parametrize("layout", ["", "tp2@(0,1)"])
def test_a_group_that_cannot_serve_what_its_members_run_is_left_alone(layout: str) -> None:
    """It has tokens sooner. A group that stands is harmful by the same price as one that could be formed."""
    assert not is_harmful(layout, rate=0.5)
    assert is_harmful(layout, rate=8.0)


def test_no_harmful_group_is_formed_for_urgent_requests() -> None:
    assert formed({"tp2": SLOW_READER, "tp4": SLOW_READER}, rate=0.5)
    assert not formed({"tp2": SLOW_READER, "tp4": SLOW_READER}, rate=8.0)


def test_where_nothing_is_known_every_group_will_do() -> None:
    seen = next(iter(looks({"tp2": SLOW_READER}, rate=8.0)))
    urgency = Urgency(seen, ready_instances(seen.instances), JudgeConfig(), DROP, JudgeHistory())
    assert not urgency.is_slow(2) and not urgency.harmful(ClusterView.of(seen, 64), [PAIR])
