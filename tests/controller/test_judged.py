"""Events of what the judge decides, and of what became of it."""

from dataclasses import replace

from pengserve.controller.events import EventDraft
from pengserve.controller.steering import Steering
from pengserve.planners.types.config import ControllerConfig, DropConfig, MergeConfig
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.snapshot import ClusterSnapshot
from tests.planners.judge.watching import served

CONFIG = ControllerConfig(
    app="test", num_instances=4, degrees=(2, 4), merge=MergeConfig(), drop=DropConfig(max_stages=4)
)


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
