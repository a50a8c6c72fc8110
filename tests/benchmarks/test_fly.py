"""Laws of the loads and figures of the fly benchmark, and one small run of it."""

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.client import Request
from benchmarks.fly import report
from benchmarks.fly.load import Phase, Plan
from benchmarks.fly.measure import SYSTEMS, Latency, Run, classes_of, latency, measure, peak_tokens_per_s
from benchmarks.result_files import read_result
from tests.benchmarks.answers import answer
from tests.support.models import tiny_model

PLAN = Plan(model=Path("model"))


def run(system: str, load: str, round_index: int, scale: float = 1.0) -> Run:
    """A run whose every figure is `scale`."""
    one = Latency(
        completed=9, ttft_mean_s=scale, ttft_p50_s=scale, ttft_p90_s=scale, tpot_mean_s=scale, tpot_p50_s=scale
    )
    names = ("low", "burst", "after") if load == "bursty" else ("urgent", "rest", "all")
    return Run(
        system=system,
        round_index=round_index,
        load=load,
        classes=dict.fromkeys(names, one),
        peak_tokens_per_s=scale,
        num_switches=2,
        failed_switches=0,
        failed=0,
    )


@pytest.mark.parametrize("load", ["bursty", "mix"])
@given(round_index=st.integers(0, 5))
def test_every_system_of_a_round_gets_the_same_load_in_other_words(load: str, round_index: int) -> None:
    make = PLAN.bursty if load == "bursty" else PLAN.mix
    ours, theirs = ([request for _, request in make(20.0, system, round_index)] for system in ("dp", "auto"))
    assert [replace(r, prompt="") for r in ours] == [replace(r, prompt="") for r in theirs]
    assert [len(r.prompt.split()) for r in ours] == [len(r.prompt.split()) for r in theirs]
    assert not {r.prompt for r in ours} & {r.prompt for r in theirs}


def test_rates_are_those_of_the_phases() -> None:
    found = [pair for i in range(20) for pair in PLAN.bursty(50.0, "dp", i)]
    burst = [r for phase, r in found if phase is Phase.BURST]
    assert len(burst) / 20 / PLAN.burst_s == pytest.approx(0.9 * 50, rel=0.05)
    assert (len(found) - len(burst)) / 20 / (2 * PLAN.low_s + PLAN.after_s) == pytest.approx(0.1 * 50, rel=0.1)
    assert all(PLAN.low_s <= r.at_s < PLAN.low_s + PLAN.burst_s for r in burst)


def test_the_mix_has_its_share_of_urgent_requests() -> None:
    found = [r for i in range(20) for _, r in PLAN.mix(50.0, "dp", i)]
    assert statistics.fmean(r.priority < 0 for r in found) == pytest.approx(PLAN.urgent_share, abs=0.02)
    assert len(found) / 20 / PLAN.mix_s == pytest.approx(0.8 * 50, rel=0.05)
    assert max(r.at_s for r in found) < PLAN.mix_s


def test_latency_leaves_out_what_failed() -> None:
    found = latency([answer(1.0, 1.5, 2.0), answer(3.0, tokens=1), answer(error="lost")])
    assert found.completed == 2
    assert found.ttft_mean_s == pytest.approx(2.0)
    assert found.tpot_mean_s == pytest.approx(0.5)  # a single token has none


@given(
    st.lists(st.lists(st.floats(0, 20), min_size=1, max_size=6).map(sorted), min_size=1, max_size=5),
    st.floats(0.1, 5),
)
def test_the_peak_is_the_best_window(times: list[list[float]], window_s: float) -> None:
    answers = [answer(*stream) for stream in times]
    events = [t for stream in times for t in stream]
    best = max(sum(end - window_s < t <= end for t in events) for end in events)
    assert peak_tokens_per_s(answers, window_s) * window_s == pytest.approx(best)


def test_classes_follow_phase_and_priority() -> None:
    requests = [Request(prompt="", max_tokens=1, priority=p) for p in (0, -1, 0)]
    answers = [answer(1.0), answer(2.0), answer(4.0)]
    found = classes_of([Phase.MIX] * 3, requests, answers)
    assert {name: f.completed for name, f in found.items()} == {"rest": 2, "urgent": 1, "all": 3}
    found = classes_of([Phase.LOW, Phase.BURST, Phase.LOW], requests, answers)
    assert {name: f.completed for name, f in found.items()} == {"low": 2, "burst": 1}


def test_ratios_are_taken_round_by_round() -> None:
    runs = [run("dp", "bursty", i, s) for i, s in enumerate((1.0, 10.0, 100.0))]
    runs += [run("auto", "bursty", i, s) for i, s in enumerate((2.0, 10.0, 50.0))]
    assert report.ratios(runs, report.BURST_TTFT, "dp") == [2.0, 1.0, 0.5]
    sentences = report.aims(runs)
    assert "x1.00 of static dp (rounds 0.50 to 2.00)" in sentences[0] and sentences[0].endswith("met")
    assert not any("static tp" in sentence for sentence in sentences)  # it did not run


def test_an_aim_that_is_missed_says_so() -> None:
    runs = [run("dp", "bursty", 0, 1.0), run("auto", "bursty", 0, 1.06)]
    assert [s.rpartition(" ")[2] for s in report.aims(runs)] == ["missed", "met"]  # latency up, throughput up
    runs = [run("dp", "bursty", 0, 1.0), run("auto", "bursty", 0, 0.94)]
    assert [s.rpartition(" ")[2] for s in report.aims(runs)] == ["met", "missed"]


def test_tables_have_a_cell_for_each_heading(tmp_path: Path) -> None:
    runs = [run(system, load, i) for system in SYSTEMS for load in ("bursty", "mix") for i in range(2)]
    for load in ("bursty", "mix"):
        assert all(len(row) == len(report.heading(load)) for row in report.rows(runs, load))
    titles = {row[0] for row in report.rows(runs, "mix")}
    assert set(report.PAPER) <= titles
    json_path, text_path = report.write(tmp_path, PLAN, {"bursty": 1.0, "mix": 2.0}, runs, "2000-01-01")
    assert len(read_result(json_path)["runs"]) == len(runs)
    assert "x1.00" in text_path.read_text()


@pytest.mark.validation
def test_a_small_run_answers_everything() -> None:
    plan = replace(
        PLAN,
        model=tiny_model(),
        engine={**PLAN.engine, "max_num_seqs": 4},
        rounds=1,
        low_s=1.0,
        burst_s=1.0,
        after_s=1.0,
        calibrate_s=0.5,
        settle_s=1.0,
        max_words=40,
        min_output=8,
        max_output=16,
    )
    runs: list[Run] = []
    capacity = measure(plan, ["dp", "auto"], ["bursty"], runs.append)
    assert capacity["bursty"] > 0
    assert [r.system for r in runs] == ["dp", "auto"]
    assert report.failures(runs) == []
    assert runs[0].num_switches == 0
    assert all(r.peak_tokens_per_s > 0 for r in runs)
