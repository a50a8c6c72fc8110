"""Laws of the switch benchmark's figures, and one small run of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.result_files import read_result
from benchmarks.switch import report
from benchmarks.switch.measure import Plan, Sample, Streams, as_data, gaps, measure, num_samples, seen
from tests.benchmarks.answers import answer
from tests.support.models import tiny_model

PLAN = Plan(model=Path("model"))


def sample(strategy: str = "carry", *, gap_s: float = 0.03, cutover_s: float = 0.01, repetition: int = 0) -> Sample:
    """A merge of two loaded instances; a step takes 5 ms before and 8 ms after."""
    streams = Streams(
        num_streams=16,
        failed=0,
        gap_s=gap_s,
        quiet_gap_s=0.006,
        step_before_s=0.005,
        step_after_s=0.008,
        probe_ttft_s=0.02,
    )
    times = {"drain_s": 0.0, "meet_s": 0.004, "cutover_s": cutover_s}
    counts = {"num_carried": 16, "num_recomputed": 0, "num_paused": 0, "num_redirected": 1, "carried_bytes": 4096}
    return Sample(
        num_instances=2,
        is_loaded=True,
        is_merge=True,
        strategy=strategy,
        repetition=repetition,
        wall_s=0.05,
        report=times | counts,
        streams=streams,
    )


def test_a_gap_counts_where_it_overlaps_the_switch() -> None:
    stream = answer(0.0, 1.0, 1.1, 1.5, 1.6, 3.0)
    assert gaps([stream], 1.2, 1.4) == [pytest.approx(0.4)]
    assert gaps([stream], 1.2, 1.55) == pytest.approx([0.4, 0.1])
    assert gaps([stream], 5.0, 6.0) == []


def test_what_streams_saw_is_split_at_the_switch() -> None:
    stream = answer(*(0.01 * i for i in range(100)), 1.3, *(1.3 + 0.02 * i for i in range(1, 60)))
    found = seen([stream, answer(error="lost")], answer(1.4, sent_s=0.9), asked_s=1.0, done_s=1.2)
    assert found.gap_s == pytest.approx(0.31)
    assert found.quiet_gap_s == pytest.approx(0.31)  # it had begun when the switch was asked for
    assert found.step_before_s == pytest.approx(0.01)
    assert found.step_after_s == pytest.approx(0.02)
    assert (found.num_streams, found.failed, found.probe_ttft_s) == (1, 1, pytest.approx(0.5))


@given(st.lists(st.lists(st.floats(0, 10), max_size=8).map(sorted), max_size=4), st.floats(0, 10), st.floats(0, 5))
def test_streams_of_any_form_give_figures(times: list[list[float]], asked_s: float, took_s: float) -> None:
    found = seen([answer(*stream) for stream in times], None, asked_s, asked_s + took_s)
    assert found.num_streams <= len(times)
    assert found.gap_s is None or found.gap_s >= 0


def test_the_aim_is_the_switch_and_two_of_the_slower_steps() -> None:
    assert report.is_within_aim(sample(gap_s=0.0299))  # 4 + 10 + 2 * 8 ms
    assert not report.is_within_aim(sample(gap_s=0.0301))
    assert report.is_within_aim(replace(sample(), streams=None)) is None


def test_rows_have_a_cell_for_each_heading_and_take_repetitions_together() -> None:
    samples = [sample(repetition=i, cutover_s=0.01 * (i + 1)) for i in range(3)] + [sample("hard")]
    rows = report.switch_rows(samples)
    assert [row[3] for row in rows] == ["carry", "hard"]
    assert rows[0][6] == "20.0 / 30.0"  # median / maximum
    assert all(len(row) == len(report.SWITCH_HEADING) for row in rows)
    assert all(len(row) == len(report.STREAM_HEADING) for row in report.stream_rows(samples))
    assert "at most 15 ms: 2 of 4 switches (median 15.0 ms)" in report.aims(samples)[0]


def test_a_switch_that_failed_is_told_and_not_counted(tmp_path: Path) -> None:
    failed = replace(sample(), report={}, errors=("no switch was reported",))
    text = report.markdown(PLAN, [sample(), failed], "2000-01-01")
    assert "no switch was reported" in text and "of 1 switches" in text
    json_path, _ = report.write(tmp_path, PLAN, [sample(), failed], "2000-01-01")
    assert read_result(json_path)["samples"][0] == json.loads(json.dumps(as_data(sample())))


@pytest.mark.validation
def test_a_small_run_sees_every_switch() -> None:
    plan = Plan(
        model=tiny_model(),
        sizes=(2,),
        strategies=("hard", "carry"),
        repetitions=1,
        idle_repetitions=1,
        streams_per_instance=2,
    )
    samples: list[Sample] = []
    measure(plan, samples.append)
    assert len(samples) == num_samples(plan)
    assert report.failures(samples) == []
    assert all(s.report["cutover_s"] > 0 and s.wall_s >= s.switch_s for s in samples)
    carried = [s for s in samples if s.is_loaded and s.strategy == "carry"]
    for s in carried:
        assert s.report["num_carried"] >= 4 and s.streams is not None and s.streams.gap_s
