"""A drop for a queue that stands is judged by the mean of some looks, and one for a queue that begins by the newest."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pengserve.planners.columns import ReadyInstances, ready_instances
from pengserve.planners.judge.changes import Change
from pengserve.planners.judge.judge import JudgeHistory, judge
from pengserve.planners.judge.prediction import Prediction, Priced
from pengserve.planners.judge.pricing import Pricing
from pengserve.planners.judge.standing import KEPT_S, MOST_LOOKS, Means, steadied
from pengserve.planners.types.config import DropConfig, JudgeConfig
from pengserve.planners.types.layout import Group, alone
from pengserve.planners.types.snapshot import ClusterSnapshot
from tests.planners.judge.watching import served

PIPELINE = Group.parse("pp2@(0,1)")
DROP = Change("drop", PIPELINE, (), tuple(alone((0, 1))), (PIPELINE,))
TICK_S = 0.5


def look(waiting: int = 5) -> tuple[ClusterSnapshot, ReadyInstances]:
    *_, seen = served(2, running=6, waiting=waiting, seconds=1.0)
    return seen, ready_instances(seen.instances)


def drop(gain_s: float, change: Change = DROP) -> Priced:
    keep = Prediction(cost_s=100.0)
    return Priced(change=change, keep=keep, then=keep, price_s=0.0, gain_s=gain_s, kept_s=100.0)


def gains(priced: Sequence[Priced], instances: ReadyInstances, every_s: float = TICK_S) -> list[float]:
    """What each of these looks, one after another, is judged by."""
    found: list[float] = []
    means: Means = {}
    for tick, one in enumerate(priced):
        (judged,), means = steadied((one,), means, instances, tick * every_s)
        found.append(judged.gain_s)
    return found


def test_the_first_look_at_a_queue_decides_alone_and_each_later_one_adds_to_the_mean() -> None:
    _, instances = look()
    assert gains([drop(30.0), drop(-60.0), drop(0.0)], instances) == pytest.approx([30.0, -15.0, -10.0])


def test_a_load_that_has_changed_is_believed_within_some_looks() -> None:
    _, instances = look()
    found = gains([drop(-100.0)] * 50 + [drop(100.0)] * 2 * MOST_LOOKS, instances)
    assert found[50] == pytest.approx(-100.0 + 200.0 / MOST_LOOKS) and found[-1] > 70.0


def test_a_mean_ends_with_its_queue() -> None:
    _, queue = look()
    _, rest = look(waiting=0)
    _, means = steadied((drop(-100.0),), {}, queue, 0.0)
    (at_rest,), means = steadied((drop(40.0),), means, rest, TICK_S)
    assert (at_rest.gain_s, at_rest.num_looks, means) == (40.0, 1, {})


@pytest.mark.parametrize(("gap_s", "expected"), [(KEPT_S, -30.0), (KEPT_S + TICK_S, 40.0)])
def test_a_change_that_some_looks_do_not_price_keeps_its_mean_for_a_while(gap_s: float, expected: float) -> None:
    _, instances = look()
    assert gains([drop(-100.0), drop(40.0)], instances, gap_s)[1] == pytest.approx(expected)


@pytest.mark.parametrize("change", [DROP._replace(is_spare=True), DROP._replace(verb="merge")])
def test_what_is_not_for_memory_is_judged_by_the_newest_look(change: Change) -> None:
    _, instances = look()
    assert gains([drop(-100.0, change), drop(40.0, change)], instances) == [-100.0, 40.0]


def test_one_look_that_pays_does_not_decide_while_a_queue_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    config, told = JudgeConfig(), list[str]()

    def judged(all_gains: Sequence[float]) -> bool:
        seen, instances = look()
        history = JudgeHistory().seen(seen, instances, config)
        for tick, gain_s in enumerate(all_gains):
            now = replace(seen, time_s=seen.time_s + tick * TICK_S)
            monkeypatch.setattr(Pricing, "price", lambda *_, gain_s=gain_s, **__: (drop(gain_s),))
            monkeypatch.setattr(Pricing, "rows_after", lambda *_: ())
            found = judge(now, instances, [DROP], config, DropConfig(max_stages=2), history)
            history = found.history
            told.append(found.priced[0].why)
        return found.best is not None

    least_s = config.least(100.0)
    assert judged([2 * least_s]), "the queue has just begun"
    assert not judged([-least_s] * 20 + [2 * least_s]) and "(mean of 8 looks)" in told[-1]
    assert judged([-least_s] * 20 + [2 * least_s] * 12)
