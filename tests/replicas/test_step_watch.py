"""Laws of the watch: what hangs is told once, what is idle, slow or compiling is not."""

import threading
import time

import pytest

from pengserve.planners.types.snapshot import InstanceStats
from pengserve.replicas import step_watch
from pengserve.replicas.step_watch import StepWatch
from tests.replicas.test_step_loop import WAIT_S, Harness
from tests.support.waiting import until

LEAST_S, FIRST_S = 0.2, 1.0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Harness, list[str]]:
    monkeypatch.setattr(step_watch, "LEAST_S", LEAST_S)
    monkeypatch.setattr(step_watch, "FIRST_S", FIRST_S)
    harness, told = Harness(), list[str]()
    StepWatch(harness.loop, told.append, period_s=0.01).start()
    return harness, told


def run_steps(harness: Harness, count: int) -> None:
    harness.idle.clear()
    harness.loop.submit(lambda: setattr(harness.lane, "left", count))
    assert harness.idle.wait(WAIT_S)


def hang(harness: Harness) -> threading.Event:
    """Makes the next step last until the event is set."""
    go_on, step = threading.Event(), harness.lane.step

    def hanging() -> object:
        go_on.wait(WAIT_S)
        return step()

    harness.lane.step = hanging  # type: ignore[method-assign]
    harness.loop.submit(lambda: setattr(harness.lane, "left", 1))
    return go_on


def test_a_step_that_hangs_is_told_once(watched: tuple[Harness, list[str]]) -> None:
    harness, told = watched
    run_steps(harness, step_watch.FIRST_STEPS)
    assert not told
    go_on = hang(harness)
    until(lambda: bool(told))
    time.sleep(2 * LEAST_S)
    assert len(told) == 1 and "a step hangs" in told[0]
    go_on.set()
    assert harness.loop.stop(WAIT_S)


def test_a_first_step_may_take_longer(watched: tuple[Harness, list[str]]) -> None:
    harness, told = watched
    go_on = hang(harness)
    time.sleep(2 * LEAST_S)
    assert not told, "kernels are compiled"
    until(lambda: bool(told))
    go_on.set()
    assert harness.loop.stop(WAIT_S)


def test_steps_may_take_several_times_as_long_as_of_late(watched: tuple[Harness, list[str]]) -> None:
    harness, told = watched
    run_steps(harness, step_watch.FIRST_STEPS)
    harness.loop.longest_s = 1.0
    go_on = hang(harness)
    time.sleep(2 * LEAST_S)
    assert not told
    go_on.set()
    assert harness.loop.stop(WAIT_S)


def test_an_idle_loop_is_healthy(watched: tuple[Harness, list[str]]) -> None:
    harness, told = watched
    run_steps(harness, step_watch.FIRST_STEPS)
    time.sleep(2 * LEAST_S)
    assert not told
    assert harness.loop.stop(WAIT_S)


def test_a_command_that_hangs_is_noticed(watched: tuple[Harness, list[str]]) -> None:
    harness, told = watched
    run_steps(harness, step_watch.FIRST_STEPS)
    go_on = threading.Event()
    harness.loop.submit(lambda: go_on.wait(WAIT_S))
    until(lambda: bool(told))
    go_on.set()
    assert harness.loop.stop(WAIT_S)


def test_the_age_of_a_step_is_told_while_it_lasts(
    watched: tuple[Harness, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_watch, "PERIOD_S", 0.05)
    harness, _ = watched
    watch = StepWatch(harness.loop, lambda why: None)
    run_steps(harness, step_watch.FIRST_STEPS)
    stats = InstanceStats(step=7)
    assert watch.aged(stats) is stats, "an idle loop costs nothing"
    go_on = hang(harness)
    until(lambda: watch.aged(stats).step_age_s > 0.1)
    assert watch.aged(stats).step_limit_s == watch.limit_s() and watch.aged(stats).step == 7
    go_on.set()
    until(lambda: watch.aged(stats) is stats)
    assert harness.loop.stop(WAIT_S)


def test_what_is_known_to_take_long_is_excused_for_that_long_and_no_longer(
    watched: tuple[Harness, list[str]],
) -> None:
    harness, told = watched
    run_steps(harness, step_watch.FIRST_STEPS)
    go_on = threading.Event()

    def compile_a_lane() -> None:
        harness.loop.excuse(1.0)
        go_on.wait(WAIT_S)

    harness.loop.submit(compile_a_lane)
    time.sleep(3 * LEAST_S)
    assert not told and harness.loop.stalled_s == 0.0
    until(lambda: bool(told))
    go_on.set()
    assert harness.loop.stop(WAIT_S)
