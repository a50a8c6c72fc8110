"""Laws of the overload benchmark's bursts that compute is too short for."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overload import report
from benchmarks.overload.__main__ import make_plan, options_of
from benchmarks.overload.calibrate import Size
from benchmarks.overload.compute import BURST_S, PEAK_RATE, bound_by_compute, compute_course
from benchmarks.overload.load import Level, Phase, Plan
from tests.benchmarks.test_overload import calibration, run

PLAN = bound_by_compute(Plan(model=Path("model"), peak_share=PEAK_RATE))


@given(per_s=st.floats(2.0, 60.0), peak=st.floats(1.2, 4.0), low=st.floats(0.1, 0.6))
def test_dp_has_answered_what_a_burst_leaves_over_before_the_next(per_s: float, peak: float, low: float) -> None:
    plan = replace(PLAN, peak_share=peak, low_share=low)
    course = compute_course(plan, Level(in_flight=16, requests_per_s=per_s))
    sent_in_burst = course.burst_requests + course.low_per_s * course.burst_s
    assert sent_in_burst == pytest.approx(peak * per_s * BURST_S, abs=1.0)
    left = sent_in_burst - per_s * course.burst_s
    assert left + (course.low_per_s - per_s) * course.calm_s < 0
    requests = plan.requests(2, course, "drop", 0)
    assert sum(phase is Phase.BURST for phase, _ in requests) == course.num_bursts * course.burst_requests


def test_what_runs_has_room() -> None:
    """If it had none, memory would be short as well."""
    most = int(PLAN.engine["max_num_batched_tokens"])
    tokens = 2.4 * PLAN.max_words  # of the benchmark's model
    assert 1 <= most / tokens <= 3, "a step reads a few prompts"
    assert PLAN.output_tokens[1] * (most / tokens + 1) * tokens < 3360, "KV of one instance of the usual plan"


def test_options_choose_the_bound() -> None:
    plan = make_plan(options_of(["--bound", "compute"]), 1)
    assert plan.is_compute_bound and plan.peak_share == PEAK_RATE
    assert make_plan(options_of(["--bound", "compute", "--peak", "1.5"]), 1).peak_share == 1.5
    assert make_plan(options_of(["--bound", "compute", "--tiny"]), 1).num_bursts == 1


def test_nothing_may_be_dropped_or_be_later() -> None:
    theirs = run("vllm-dp", scale=1.0)
    good = [theirs, run("drop", scale=1.1)]
    assert [line.rpartition(" ")[2] for line in report.aims(good, is_compute_bound=True)] == ["met"] * 5
    bad = [theirs, run("drop", scale=1.2, drops=[(5.0, 9.0)])]
    found = report.aims(bad, is_compute_bound=True)
    assert [line.rpartition(" ")[2] for line in found[:2]] == ["missed", "missed"]


def test_a_report_says_what_dp_answers() -> None:
    size = Size(
        num_instances=2,
        weight_bytes=25 << 20,
        calibration=calibration(),
        course=compute_course(PLAN, calibration().full),
    )
    text = report.markdown(PLAN, size, [run("vllm-dp"), run("drop")], "2000-01-01", "plot.svg")
    assert "Static dp answers 2.5 requests/s with 20 in flight" in text and "2 times as many requests" in text
