"""Events of what the judge decides, and of what became of it."""

from dataclasses import replace

import pytest

from pengserve.controller.events import EventDraft
from pengserve.controller.steering import Steering
from pengserve.planners.types.config import ControllerConfig, DropConfig, MergeConfig, MigrateConfig
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.snapshot import ClusterSnapshot
from pengserve.planners.types.step_cost import StepCost
from tests.planners.judge.watching import COST, COSTS, served

CONFIG = ControllerConfig(
    app="test", num_instances=4, degrees=(2, 4), merge=MergeConfig(), drop=DropConfig(max_stages=4)
)

MOVING = replace(CONFIG, num_instances=2, migrate=MigrateConfig(is_auto=True))


def heard(steering: Steering, looks: list[ClusterSnapshot]) -> list[EventDraft]:
    return [draft for seen in looks for draft in steering.next_switch(seen)[1]]


def test_a_decision_tells_all_options_and_its_outcome_has_the_same_span() -> None:
    steering = Steering(CONFIG, lambda: 0.0)
    before = list(served(4, rate=0.8, running=1, seconds=4))
    news = heard(steering, before)
    decided = [draft for draft in news if draft.kind is EventKind.PLAN_DECIDED and "predicted" in draft.data]
    assert decided and decided[0].data["group"] == "tp4@(0,1,2,3)" and decided[0].data["gain_s"] > 0
    options = decided[0].data["options"]
    assert options[0]["action"] == "keep" and len(options) > 3
    assert all("predicted" in option for option in options[1:])
    gap_s = before[-1].time_s - next(served(4)).time_s + 0.5
    after = [replace(seen, time_s=seen.time_s + gap_s) for seen in served(4, "tp4@(0..3)", rate=0.8, running=1)]
    outcomes = [d for d in heard(steering, after) if d.kind is EventKind.PLAN_OUTCOME and d.data["action"] == "merge"]
    assert [outcome.span for outcome in outcomes] == [decided[0].span]
    data = outcomes[0].data
    assert data["error"] > 0 and data["measured"]["tpot_s"] > 0 and data["predicted"]["tpot_s"] > 0


def test_a_drop_that_would_not_pay_is_told_as_a_decision_to_keep() -> None:
    steering = Steering(CONFIG, lambda: 100.0)
    looks = list(served(2, rate=9.0, prompt=2000, output=50, running=64, waiting=30, seconds=4))
    kept = [d for d in heard(steering, looks) if d.kind is EventKind.PLAN_DECIDED and d.data["action"] == "keep"]
    assert len(kept) == 1 and any(option["action"] == "drop" for option in kept[0].data["options"])


def test_a_move_that_pays_is_told_once_with_its_price_and_its_outcome() -> None:
    clock = [0.0]
    steering, told = Steering(MOVING, lambda: clock[0]), list[EventDraft]()
    before = list(served(2, rate=0.3, prompt=1000, output=400, running=6, blocks=256, seconds=40))
    for seen in before:
        clock[0] = seen.time_s
        full = [replace(i.stats, kv_blocks_used=used) for i, used in zip(seen.instances, (250, 20), strict=True)]
        full[0] = replace(full[0], num_waiting=3, queued_tokens=3000)
        seen = replace(seen, instances=tuple(replace(i, stats=s) for i, s in zip(seen.instances, full, strict=True)))
        told += steering.next_switch(seen)[1]
        source, target = (i.key for i in seen.instances)
        orders, news = steering.paying_moves(
            (Migrate(order_id="x", source=source, target=target, max_tokens=3000),), seen
        )
        told += news
    moves = [d for d in told if d.kind is EventKind.PLAN_DECIDED and d.data["action"] == "migrate"]
    assert orders and 1 < len(moves) < len(before) / 8, "news, and no heartbeat"
    assert moves[0].data["group"] == "dp@(0) -> dp@(1)" and "dp@(0)" in moves[0].why
    assert moves[0].data["gain_s"] > 0 < moves[0].data["price_s"] and moves[0].data["predicted"]
    assert [option["action"] for option in moves[0].data["options"]] == ["keep", "migrate"]
    outcomes = [d for d in told if d.kind is EventKind.PLAN_OUTCOME and d.data["action"] == "migrate"]
    assert outcomes and outcomes[0].span == moves[0].span


@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_without_a_profile_prices_follow_from_the_totals_of_steps_that_instances_report(slow: float) -> None:
    """An instance under load is never idle, and so never profiled."""
    news = heard(Steering(CONFIG, lambda: 0.0), list(served(4, rate=0.8, running=1, seconds=8, costs={}, slow=slow)))
    decided = next(d for d in news if d.kind is EventKind.PLAN_DECIDED and "predicted" in d.data)
    alone_s = slow * COST.step_s(1, 1, 1100)
    assert decided.data["group"] == "tp4@(0,1,2,3)"
    # Four compute a token in more than a quarter of the time of one.
    assert alone_s / 4 < decided.data["predicted"]["tpot_s"] < alone_s


def test_a_profile_that_instances_tell_decides_what_a_pipeline_is_worth() -> None:
    """Of a small model most of a step is no work of layers, and each stage has all of it.

    Prompts would take a quarter of one pipeline's time, and nearly twice the time that the other has.
    """
    looks = {"rate": 2.0, "prompt": 1000, "output": 500, "running": 6, "waiting": 12, "blocks": 256}
    host = StepCost(**{n: 8 * getattr(COST, n) for n in COST.__slots__})
    dropped = [
        [d for d in heard(Steering(CONFIG, lambda: 0.0), list(served(2, costs=costs, **looks))) if is_drop(d)]
        for costs in (COSTS, dict(COSTS) | {"pp2": host})
    ]
    assert dropped[0] and not dropped[1]


def is_drop(draft: EventDraft) -> bool:
    """Whether it tells of a drop that was decided because it pays."""
    return draft.kind is EventKind.PLAN_DECIDED and draft.data["action"] == "drop" and "predicted" in draft.data
