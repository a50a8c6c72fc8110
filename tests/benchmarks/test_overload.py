"""Laws of the load, the timeline, the figures and the plot of the overload benchmark, and one small run of it."""

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.overload import plot, report, timeline
from benchmarks.overload.__main__ import make_plan, options_of
from benchmarks.overload.calibrate import Rehearsal, Size
from benchmarks.overload.load import (
    Calibration,
    Course,
    Level,
    Phase,
    Plan,
    demand,
    make_course,
    predicted_peak,
    with_tokens,
)
from benchmarks.overload.measure import SYSTEMS, Run, measure
from benchmarks.overload.systems import layout_changes
from benchmarks.overload.timeline import LayoutChange, Timeline, groups_of
from benchmarks.result_files import read_result
from pengserve.controller import layout as layouts
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import Epoch, InstanceId
from pengserve.planners.types.layout import Group, GroupKind, Layout
from tests.benchmarks.answers import answer
from tests.support.models import EVEN, SHALLOW, tiny_model

PLAN = Plan(model=Path("model"), num_bursts=2)
COURSE = Course(low_per_s=2.0, burst_requests=12, lead_s=4.0, burst_s=3.0, calm_s=20.0, num_bursts=2)
DP = tuple(Group(kind=GroupKind.DP, members=(InstanceId(i),)) for i in range(2))
PP = (Group(kind=GroupKind.PP, members=(InstanceId(0), InstanceId(1))),)


def calibration(few_life_s: float = 4.0, full_life_s: float = 8.0) -> Calibration:
    """4 requests live so long, and 20."""
    few, full = (Level(in_flight=n, requests_per_s=n / life) for n, life in ((4, few_life_s), (20, full_life_s)))
    return Calibration(prompt_tokens=300.0, dp_tokens=8704, pp_tokens=10720, few=few, full=full)


def line(
    bursts: Sequence[tuple[float, float]] = ((4.0, 7.0), (27.0, 30.0)), drops: Sequence[tuple[float, float]] = ()
) -> Timeline:
    return Timeline(
        end_s=50.0,
        bursts=tuple(bursts),
        demand=(0.0, 500.0, 900.0),
        capacity=((0.0, 800.0), (10.0, 1000.0)),
        drops=tuple(drops),
        ttft=((0.5, 0.02), (5.0, 3.0)),
    )


def run(system: str, round_index: int = 0, scale: float = 1.0, drops: Sequence[tuple[float, float]] = ()) -> Run:
    """A run whose every latency is `scale`."""
    return Run(
        system=system,
        num_instances=2,
        round_index=round_index,
        num_requests=9,
        burst_requests=4,
        failed=0,
        first_error="",
        ttft_p50_s=scale,
        ttft_p90_s=scale,
        ttft_p99_s=scale,
        burst_ttft_p99_s=scale,
        tpot_p50_s=scale,
        tpot_p99_s=scale,
        gap_p99_s=scale,
        preemptions=3,
        switch_errors=(),
        demand_mean=0.5,
        demand_peak=1.1,
        stolen=0.0,
        timeline=line(drops=drops),
    )


# The load -------------------------------------------------------------------------------------------------------------


@given(round_index=st.integers(0, 5), num_instances=st.sampled_from([2, 4]))
def test_every_system_of_a_round_gets_the_same_load_in_other_words(round_index: int, num_instances: int) -> None:
    ours, theirs = (PLAN.requests(num_instances, COURSE, system, round_index) for system in ("drop", "vllm-dp"))
    assert [(p, replace(r, prompt="")) for p, r in ours] == [(p, replace(r, prompt="")) for p, r in theirs]
    assert [len(r.prompt.split()) for _, r in ours] == [len(r.prompt.split()) for _, r in theirs]
    assert not {r.prompt for _, r in ours} & {r.prompt for _, r in theirs}


@given(round_index=st.integers(0, 5))
def test_bursts_have_their_requests_and_the_rest_its_rate(round_index: int) -> None:
    found = PLAN.requests(2, COURSE, "drop", round_index)
    assert [r.at_s for _, r in found] == sorted(r.at_s for _, r in found)
    for start_s, stop_s in COURSE.bursts:
        assert sum(start_s <= r.at_s < stop_s for p, r in found if p is Phase.BURST) == COURSE.burst_requests
    low = [r.at_s for p, r in found if p is Phase.LOW]
    assert len(found) - len(low) == COURSE.num_bursts * COURSE.burst_requests
    assert len(low) == round(COURSE.low_per_s * COURSE.end_s)
    assert max(low) < COURSE.end_s


def test_without_options_the_plan_is_the_one_that_is_documented() -> None:
    plan = make_plan(options_of([]), 1)
    assert plan == Plan(model=plan.model)
    assert make_plan(options_of(["--peak", "1.45"]), 1) == replace(plan, peak_share=1.45)


def test_instances_that_share_cores_have_half_the_layers_and_as_large_a_share_of_weights() -> None:
    plan, shared = (make_plan(options_of([]), n) for n in (1, 1 + len(os.sched_getaffinity(0))))
    assert shared == plan.on_shared_cores(shared.model)
    assert replace(EVEN, num_layers=EVEN.num_layers // 2) == SHALLOW
    layer_bytes = plan.memory_bytes / EVEN.num_layers
    assert shared.memory_bytes / SHALLOW.num_layers == pytest.approx(layer_bytes, rel=0.02)
    own = make_plan(options_of(["--model", str(plan.model)]), 1 + len(os.sched_getaffinity(0)))
    assert own == plan, "a model of the user's own has the memory that is documented"


def test_prompts_know_about_how_many_tokens_they_have() -> None:
    requests = PLAN.requests(2, COURSE, "drop", 0)
    assert [r.prompt_tokens for r in with_tokens(requests, 2.5)] == [
        round(2.5 * len(r.prompt.split())) for _, r in requests
    ]


@given(came=st.floats(0.6, 1.0))
def test_a_burst_is_so_large_that_what_comes_of_it_is_the_wanted_peak(came: float) -> None:
    found = replace(calibration(), came=came)
    course = make_course(PLAN, found)
    assert course.burst_requests >= make_course(PLAN, calibration()).burst_requests
    two = 2 * (300.0 + PLAN.output_tokens[1])  # requests: one more, and one that ends just before the peak or not
    peak = PLAN.peak_share * found.dp_tokens
    assert peak <= came * predicted_peak(PLAN, calibration(), course) <= peak + two


def test_a_report_says_what_rehearsals_came_to() -> None:
    came = tuple(Rehearsal(burst_requests=n, demand_peak=share) for n, share in ((20, 0.95), (26, 1.184)))
    size = Size(num_instances=2, weight_bytes=25 << 20, calibration=calibration(), course=COURSE, rehearsals=came)
    assert "bursts of 20, 26 more came to 0.95, 1.18 of what dp holds" in report.load_line(PLAN, size)


@given(life_s=st.floats(2.0, 8.0), per_s=st.floats(1.0, 4.0))
def test_demand_follows_littles_law_where_lives_are_constant(life_s: float, per_s: float) -> None:
    found = calibration(life_s, life_s)
    arrivals = [i / per_s for i in range(int(60 * per_s))]
    trace = demand(found, arrivals, prompt_tokens=300.0, output_tokens=100.0, end_s=60.0)
    steady = [tokens for time_s, tokens in trace if 10.0 <= time_s < 58.0]
    assert sum(steady) / len(steady) == pytest.approx(per_s * life_s * 350.0, rel=0.06)


def test_the_course_is_the_least_that_overloads_dp_and_has_the_wanted_mean() -> None:
    found = calibration()
    course = make_course(PLAN, found)
    peak = PLAN.peak_share * found.dp_tokens

    def trace(burst_requests: int) -> list[tuple[float, float]]:
        arrivals = [i / course.low_per_s for i in range(int(course.end_s * course.low_per_s))]
        start_s, stop_s = course.bursts[0]
        gap_s = (stop_s - start_s) / burst_requests
        arrivals += [start_s + (i + 0.5) * gap_s for i in range(burst_requests)]
        tokens = found.prompt_tokens + 16
        return demand(found, arrivals, prompt_tokens=tokens, output_tokens=PLAN.mean_output, end_s=course.bursts[1][0])

    assert max(tokens for _, tokens in trace(course.burst_requests)) == pytest.approx(peak, rel=0.06)
    assert max(tokens for _, tokens in trace(course.burst_requests - 2)) < peak
    period = [tokens for time_s, tokens in trace(course.burst_requests) if time_s >= course.lead_s]
    assert sum(period) / len(period) / found.dp_tokens == pytest.approx(1 / PLAN.headroom, rel=0.06)
    assert course.burst_s == pytest.approx(PLAN.burst_lives * found.full.life_s)


def test_a_low_load_above_the_wanted_mean_is_refused() -> None:
    with pytest.raises(ValueError, match="low_share"):
        make_course(replace(PLAN, low_share=0.6), calibration())


@given(factor=st.floats(0.01, 20.0), prompt_tokens=st.floats(1.0, 400.0))
def test_answers_are_scaled_as_far_as_model_and_prompts_let_them(factor: float, prompt_tokens: float) -> None:
    found = PLAN.scaled(factor, prompt_tokens)
    room = int(PLAN.engine["max_model_len"]) - 2 * prompt_tokens
    assert replace(found, output_tokens=PLAN.output_tokens) == PLAN
    for tokens, before in zip(found.output_tokens, PLAN.output_tokens, strict=True):
        assert 1 <= tokens <= room
        wanted = max(factor, PLAN.least_answer * prompt_tokens / PLAN.mean_output) * before
        assert tokens == pytest.approx(wanted, abs=1.0) or tokens == int(room)


# What happened when ---------------------------------------------------------------------------------------------------


def test_demand_counts_what_is_in_flight_in_whole_blocks() -> None:
    early = replace_prompt(answer(1.0, 2.0, 3.0, sent_s=0.5), 32)
    late = replace_prompt(answer(2.5, 5.0, sent_s=2.0), 10)
    lost = replace_prompt(answer(sent_s=0.0, error="lost"), 99)
    found = timeline.demand([early, late, lost], 0.0, 5.0, 32)
    at = {i * timeline.SAMPLE_S: tokens for i, tokens in enumerate(found)}
    assert at[0.0] == 0
    assert at[0.5] == 32  # waits, with its prompt
    assert at[1.0] == 64  # and one token
    assert at[2.0] == 64 + 32
    assert at[3.0] == 32  # the first has ended
    assert at[5.0] == 0


def replace_prompt(found: object, prompt_tokens: int) -> object:
    found.prompt_tokens = prompt_tokens  # type: ignore[attr-defined]
    return found


def test_drop_periods_are_from_the_first_pipeline_until_the_last_has_ended() -> None:
    pair = Group(kind=GroupKind.PP, members=(InstanceId(2), InstanceId(3)))
    steps = [(0.0, DP), (2.0, PP), (3.0, (*PP, pair)), (5.0, (pair, *DP)), (6.0, DP), (9.0, PP)]
    changes = [LayoutChange(time_s=time_s, groups=groups) for time_s, groups in steps]
    assert timeline.drop_periods(changes, 12.0) == ((2.0, 6.0), (9.0, 12.0))


def test_a_static_pipeline_has_dropped_nothing() -> None:
    assert timeline.drop_periods([LayoutChange(time_s=0.0, groups=PP)], 12.0) == ()


@pytest.mark.parametrize(
    ("drops", "expected"),
    [
        ((), (0.0, 0.0)),
        (((5.0, 12.0),), (5.0, 0.0)),
        (((5.0, 6.0),), (0.0, 0.0)),  # back before the burst has ended
        (((5.0, 8.0), (9.0, 13.0)), (6.0, 0.0)),  # it came again: the last counts
        (((5.0, 28.0),), (None, 0.0)),  # until into the next burst
        (((28.0, 34.5),), (0.0, 4.5)),
    ],
)
def test_the_way_back_counts_from_the_bursts_end(drops: Sequence[tuple[float, float]], expected: object) -> None:
    assert line(drops=drops).backs_s == pytest.approx(expected)


def test_layouts_are_read_from_the_controllers_events() -> None:
    groups = (*PP, Group(kind=GroupKind.DP, members=(InstanceId(2),)))
    change = layouts.changed(Layout(epoch=Epoch(3), groups=groups), "memory")
    event = Event(seq=1, time_s=107.5, kind=change.kind, data=change.data)
    other = Event(seq=2, time_s=108.0, kind=EventKind.TRANSITION_END, data={"groups": "pp2@(0,1)"})
    (found,) = layout_changes([event, other], 100.0)
    assert found == LayoutChange(time_s=7.5, groups=groups)
    assert groups_of("") == ()


# The report -----------------------------------------------------------------------------------------------------------


def test_aims_are_met_at_their_limits_and_missed_beyond() -> None:
    good = [run("vllm-dp", scale=10.0), replace(run("drop", drops=[(5.0, 17.0)]), tpot_p50_s=12.5)]
    assert [sentence.rpartition(" ")[2] for sentence in report.aims(good)] == ["met"] * 4
    bad = replace(run("drop", scale=1.01, drops=[(5.0, 17.1)]), tpot_p50_s=12.6, failed=1)
    assert [sentence.rpartition(" ")[2] for sentence in report.aims([good[0], bad])] == ["missed"] * 4


def test_a_layout_that_does_not_come_back_misses_its_aim() -> None:
    sentence = report.aims([run("drop", drops=[(5.0, 29.0)])])[-1]
    assert "never" in sentence and sentence.endswith("missed")


def test_ratios_are_taken_round_by_round() -> None:
    runs = [run("vllm-dp", i, s) for i, s in enumerate((1.0, 10.0, 100.0))]
    runs += [run("drop", i, s) for i, s in enumerate((2.0, 10.0, 50.0))]
    assert report.ratios(runs, report.TTFT_P99, "drop", "vllm-dp") == [2.0, 1.0, 0.5]
    row = next(row for row in report.rows(runs) if row[0] == report.TTFT_P99.title)
    assert row[1:] == ["10000 (x1.00)", "10000"]


def test_a_run_in_which_a_server_stood_still_says_so() -> None:
    still = replace(run("vllm-dp"), silence_s=report.STANDS_STILL_S + 1)
    assert report.standstills([run("drop"), replace(still, silence_s=report.STANDS_STILL_S)]) == []
    assert report.standstills([still, run("drop")]) == [
        "vLLM data parallel, 2 instances, round 1: a server that had requests sent nothing for 11 s. Run this round "
        "again; its figures say nothing."
    ]


def test_files_have_all_runs_and_a_panel_for_each_system(tmp_path: Path) -> None:
    runs = [run(system, i, drops=[(5.0, 9.0)] if system == "drop" else ()) for system in SYSTEMS for i in range(2)]
    size = Size(num_instances=2, weight_bytes=25 << 20, calibration=calibration(), course=COURSE)
    json_path, text_path, plot_path = report.write(tmp_path, PLAN, size, runs, "2000-01-01")
    record = read_result(json_path)
    assert len(record["runs"]) == len(runs) and record["size"]["course"]["burst_requests"] == 12
    text = text_path.read_text()
    assert f"]({plot_path.name})" in text
    assert all(len(row) == 1 + len(SYSTEMS) for row in report.rows(runs))
    drawing = ET.fromstring(plot_path.read_text())
    groups = drawing.findall("{http://www.w3.org/2000/svg}g")
    assert [group[0].text for group in groups] == [report.NAMES[system] for system in SYSTEMS]
    shaded = [sum(shape.get("fill") == plot.DROPPED for shape in group) for group in groups]
    assert shaded == [system == "drop" for system in SYSTEMS]


def test_the_plot_keeps_everything_inside_its_panel() -> None:
    drawing = ET.fromstring(plot.draw([run("drop", drops=[(5.0, 9.0)])], report.NAMES))
    panel = drawing.find("{http://www.w3.org/2000/svg}g")
    assert panel is not None
    for shape in panel:
        for x, y in [point.split(",") for point in shape.get("points", "").split()]:
            assert plot.LEFT <= float(x) <= plot.WIDTH - plot.RIGHT and 0 <= float(y) <= plot.PANEL_HEIGHT
    dots = re.findall(r"M([\d.-]+),([\d.-]+)h0", next(shape.get("d", "") for shape in panel if shape.get("d")))
    assert len(dots) == len(run("drop").timeline.ttft)
    assert all(plot.LEFT <= float(x) <= plot.WIDTH - plot.RIGHT for x, _ in dots)
    assert all(0 <= float(y) <= plot.PANEL_HEIGHT for _, y in dots)


# A small run ----------------------------------------------------------------------------------------------------------


@pytest.mark.validation
@pytest.mark.timeout(600)
def test_a_small_run_answers_everything_on_every_system(tmp_path: Path) -> None:
    plan = replace(PLAN.tiny(), model=tiny_model(), memory_bytes=9 << 20, chunk_bytes=64 << 10, rehearsals=2)
    seen: list[tuple[Plan, Size] | Run] = []
    systems = ["vllm-dp", "vllm-pp", "dp", "drop"]
    sized, size, runs = measure(plan, 2, systems, tmp_path, lambda *load: seen.append(load), seen.append)
    assert seen == [(sized, size), *runs]
    assert replace(sized, output_tokens=plan.output_tokens) == plan
    assert 0.4 < size.calibration.full.life_s / plan.life_s < 2.5
    assert {r.system for r in runs} == {"vllm-dp", "vllm-pp", "dp", "drop"}
    assert report.failures(runs) == []
    assert len(size.rehearsals) == plan.rehearsals * plan.rounds
    assert size.calibration.gain == pytest.approx(0.25, abs=0.1)
    held = {r.system: r.timeline.capacity[0][1] for r in runs}
    assert held["vllm-dp"] == pytest.approx(held["dp"], rel=0.1)
    assert held["vllm-pp"] == pytest.approx(size.calibration.pp_tokens, rel=0.1)
    assert all(r.demand_mean > 0 for r in runs)
    assert all(0 < r.silence_s <= report.STANDS_STILL_S for r in runs) and report.standstills(runs) == []
    # What a simulation of the runs needs.
    assert all(len(r.requests) == r.num_requests for r in runs)
    assert all(record.at_s < record.first_s <= record.end_s for r in runs for record in r.requests)
    assert [found.system for found in size.profiles] == ["vllm", "pengserve"]
    assert all(0 < found.model.batch_s([]) + found.model.tokens_s(100, 1) < 1 for found in size.profiles)
    num_levels = {r.system: [len(sweep) for sweep in r.levels] for r in runs}
    assert num_levels == {"vllm-dp": [2, 2], "vllm-pp": [], "dp": [2, 2], "drop": [3, 3]}
    assert all(len(level) > 0 for r in runs for sweep in r.levels for level in sweep)
