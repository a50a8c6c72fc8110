"""Laws of what a stage counts as computing and as standing idle."""

import pytest

from pengserve.replicas.engine.groups.stage_clock import StageClock

Microbatch = tuple[float, float, bool]  # begins, ends, is the first after the pipeline had no work


def clock_of(microbatches: list[Microbatch]) -> StageClock:
    """A clock that has seen these."""
    times_s = iter([time_s for begin_s, end_s, _ in microbatches for time_s in (begin_s, end_s)])
    clock = StageClock(lambda: next(times_s))
    for _, _, is_first in microbatches:
        clock.begin(is_first=is_first)
        clock.end()
    return clock


def test_all_time_from_the_first_microbatch_to_the_last_is_busy_or_idle() -> None:
    clock = clock_of([(10.0, 11.0, True), (11.5, 14.0, False), (16.0, 16.25, False)])
    assert clock.busy_s == pytest.approx(3.75)
    assert clock.busy_s + clock.idle_s == pytest.approx(16.25 - 10.0)


def test_time_without_work_is_no_bubble() -> None:
    clock = clock_of([(0.0, 1.0, True), (100.0, 101.0, True), (101.5, 102.0, False)])
    assert clock.idle_s == pytest.approx(0.5)


def test_time_between_two_pipelines_is_no_bubble() -> None:
    times_s = iter([0.0, 1.0, 50.0, 52.0])
    clock = StageClock(lambda: next(times_s))
    clock.begin(is_first=True)
    assert clock.end() == 1.0
    clock.forget()  # the group ends, and another one is formed
    clock.begin(is_first=False)
    clock.end()
    assert (clock.busy_s, clock.idle_s) == (3.0, 0.0)
