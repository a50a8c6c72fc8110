"""A drop for a queue that begins is judged by the newest look; one that can wait, by the mean of some."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pengserve.planners.columns import ReadyInstances, ready_instances
from pengserve.planners.judge.changes import Change
from pengserve.planners.judge.judge import JudgeHistory, judge
from pengserve.planners.judge.prediction import Prediction, Priced
from pengserve.planners.judge.pricing import Pricing
from pengserve.planners.judge.standing import STANDS_S, Needs, steadied
from pengserve.planners.types.config import DropConfig, JudgeConfig
from pengserve.planners.types.layout import Group, alone
from pengserve.planners.types.snapshot import ClusterSnapshot
from tests.planners.judge.watching import served

PIPELINE = Group.parse("pp2@(0,1)")
DROP = Change("drop", PIPELINE, (), tuple(alone((0, 1))), (PIPELINE,))
EARLY = DROP._replace(can_wait=True)
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
    needs: Needs = {}
    for tick, one in enumerate(priced):
        (judged,), needs = steadied((one,), needs, instances, tick * every_s)
        found.append(judged.gain_s)
    return found


def test_a_queue_that_begins_is_judged_by_the_newest_look_and_one_that_stands_by_the_mean_of_some() -> None:
    _, instances = look()
    priced = [drop(gain_s) for gain_s in (10.0, -70.0, 30.0, 0.0, -20.0, 110.0)]
    assert gains(priced, instances) == pytest.approx([10.0, -70.0, 30.0, 0.0, -10.0, 10.0])


def test_a_load_that_has_changed_is_believed_as_soon_as_all_looks_are_of_it() -> None:
    _, instances = look()
    found = gains([drop(-100.0)] * 50 + [drop(100.0)] * 5, instances)
    assert found[50:] == pytest.approx([-60.0, -20.0, 20.0, 60.0, 100.0])


def test_a_queue_ends_where_nothing_waits() -> None:
    _, queue = look()
    _, rest = look(waiting=0)
    needs: Needs = {}
    for tick in range(10):
        _, needs = steadied((drop(-100.0),), needs, queue, tick * TICK_S)
    assert set(needs) == {DROP.what}
    (at_rest,), needs = steadied((drop(40.0),), needs, rest, 10 * TICK_S)
    assert (at_rest.gain_s, at_rest.num_looks, needs) == (40.0, 1, {})


def test_a_queue_that_looks_have_not_priced_for_a_while_has_just_begun() -> None:
    _, instances = look()
    assert gains([drop(-100.0), drop(40.0)], instances, STANDS_S)[1] == pytest.approx(-30.0)
    assert gains([drop(-100.0), drop(40.0)], instances, STANDS_S + TICK_S)[1] == 40.0


def test_memory_that_is_nearly_full_waits_for_looks_that_agree() -> None:
    """The two seconds before the first look count as seconds without any gain."""
    _, rest = look(waiting=0)
    assert gains([drop(80.0, EARLY)] * 6, rest) == pytest.approx([0.0, 20.0, 40.0, 60.0, 80.0, 80.0])
    mixed = [drop(gain_s, EARLY) for gain_s in (80.0, -40.0, -40.0, -40.0, -40.0, 140.0)]
    assert gains(mixed, rest)[-1] == pytest.approx(-4.0)


def test_memory_that_will_not_do_is_met_at_once() -> None:
    _, rest = look(waiting=0)
    assert gains([drop(-80.0), drop(40.0)], rest) == [-80.0, 40.0]


def test_a_queue_that_begins_where_memory_was_nearly_full_is_met_at_once() -> None:
    _, queue = look()
    _, rest = look(waiting=0)
    needs: Needs = {}
    for tick in range(5):
        _, needs = steadied((drop(-80.0, EARLY),), needs, rest, tick * TICK_S)
    (judged,), needs = steadied((drop(40.0, EARLY),), needs, queue, 5 * TICK_S)
    assert (judged.gain_s, judged.num_looks, needs[EARLY.what].since_s) == (40.0, 1, 5 * TICK_S)


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
    assert not judged([-least_s] * 20 + [2 * least_s]) and "(mean of 5 looks)" in told[-1]
    assert judged([-least_s] * 20 + [2 * least_s] * 12)
