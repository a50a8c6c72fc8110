"""Simulations of bench-overload's runs: on runs that were themselves simulated, and on the newest real ones."""

import copy
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import engine_flags
from benchmarks.overload.record import SIMULATED, Record
from benchmarks.overload.simulated import (
    Host,
    Recorded,
    compare,
    compare_all,
    is_complete,
    newest_results,
    repeatability,
)
from benchmarks.result_files import read_result
from pengserve.planners.cost_model import CostModel
from pengserve.simulator.result import Result

STEPS = CostModel(
    prefix_attention_s=5e-8, self_attention_s=2e-8, kv_read_s=4e-7, ffn_s=1.2e-4, other_s=1e-4, load_s=5e-3
)
HIDDEN = Host(share=0.3, stage_s=4e-3)  # what the simulation has to find out


def loads(count: int, per_s: float, seed: int) -> tuple[Record, ...]:
    """Requests without answers."""
    source, at_s, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += source.expovariate(per_s)
        prompt, output = source.randint(250, 450), source.randint(200, 300)
        found.append(Record(at_s=at_s, prompt_tokens=prompt, output_tokens=output, first_s=0.0, end_s=0.0))
    return tuple(found)


def answered(records: tuple[Record, ...], result: Result) -> list[dict[str, Any]]:
    """The same with the answers of a simulation, as a result of the benchmark has them."""
    return [
        asdict(record) | {"first_s": outcome.first_token_s, "end_s": outcome.end_s}
        for record, outcome in zip(records, result.outcomes, strict=True)
    ]


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """A result of two instances whose every request was answered by a simulation with `HIDDEN`."""
    few, full = loads(12, 1.0, 1), loads(40, 3.0, 2)
    size = {
        "num_instances": 2,
        "weight_bytes": 25_179_648,
        "calibration": {"dp_tokens": 8704, "pp_tokens": 10_700},
        "profiles": [{"system": system, "model": asdict(STEPS)} for system in ("vllm", "pengserve")],
    }
    plan = {
        "model": "wide-0",
        "peak_share": 1.6,
        "restore_below": 0.75,
        "stages": 2,
        "engine": engine_flags(max_num_seqs=128),
    }
    machine = {"cores": 2}
    data: dict[str, Any] = {"date": "2026-11-21", "machine": machine, "plan": plan, "size": size, "runs": []}
    load = loads(60, 4.0, 3)
    run_of = {"num_instances": 2, "round_index": 0, "requests": [{}], "levels": [[[{}]]]}
    held = {"capacity": [[0.0, 8704.0]]}
    data["runs"] = [{"system": system, **run_of, "timeline": held} for system in ("vllm-dp", "dp", "drop")]
    recorded = Recorded(data, scheduler="fast")
    for run in data["runs"]:
        system = "vllm-dp" if run["system"] == "vllm-dp" else "dp"
        levels = [answered(level, recorded.replay(system, level, HIDDEN)) for level in (few, full)]
        staged = [answered(full, recorded.replay("pp", full, HIDDEN))] if run["system"] == "drop" else []
        answers = answered(load, recorded.replay(run["system"], load, HIDDEN))
        run |= {"levels": 2 * [[*levels, *staged]], "requests": answers}
    return json.loads(json.dumps(data))


@pytest.mark.validation
def test_what_host_and_stages_take_is_found_out_from_the_levels_alone(data: dict[str, Any]) -> None:
    runs = [run | {"requests": [{}]} for run in data["runs"]]
    recorded = Recorded(data | {"runs": runs}, scheduler="fast")
    for run in runs:
        host = recorded.fit_host(run)
        assert host.share == pytest.approx(HIDDEN.share, rel=0.05)
        assert (host.step_s, host.log_kv) == (pytest.approx(0.0, abs=5e-4), pytest.approx(0.0, abs=0.05))
        assert host.stage_s == pytest.approx(HIDDEN.stage_s if run["system"] == "drop" else 0.0, rel=0.1)
        assert host.request_s == pytest.approx(0.0, abs=2e-3)


@pytest.mark.validation
def test_time_per_token_is_right_on_each_level_whatever_differs_from_the_profile(data: dict[str, Any]) -> None:
    """As on the machine: a step has more to do besides requests, and a request costs it less."""
    recorded, hidden = Recorded(data, scheduler="fast"), Host(share=0.2, step_s=1e-3, log_kv=-0.5)
    few, full = loads(3, 30.0, 1), loads(17, 90.0, 2)
    levels = [answered(level, recorded.replay("dp", level, hidden)) for level in (few, full)]
    host = recorded.fit_host({"system": "dp", "levels": [levels, levels]})
    for level in levels:
        records = [Record(**record) for record in level]
        errors = {f.what: f.error for f in compare(records, recorded.replay("dp", records, host))}
        assert abs(errors["P50 TPOT"]) < 0.02


@pytest.mark.validation
@pytest.mark.parametrize("request_s", [0.005, 0.02])
def test_time_before_an_instance_has_a_request_is_found_out_from_few(data: dict[str, Any], request_s: float) -> None:
    recorded, hidden = Recorded(data, scheduler="fast"), Host(share=0.2, request_s=request_s)
    levels = [answered(level, recorded.replay("dp", level, hidden)) for level in (loads(12, 1.0, 1), loads(40, 3.0, 2))]
    host = recorded.fit_host({"system": "dp", "levels": [levels, levels]})
    assert host.request_s == pytest.approx(request_s, abs=2e-3)
    for level in levels:
        records = [Record(**record) for record in level]
        errors = {f.what: f.error for f in compare(records, recorded.replay("dp", records, host))}
        assert abs(errors["P50 TTFT"]) < 0.05 and abs(errors["P50 TPOT"]) < 0.02


@pytest.mark.validation
def test_runs_of_the_simulation_itself_are_within_the_bars(data: dict[str, Any]) -> None:
    figures, notes = compare_all(data, scheduler="fast")
    assert len(figures) == 12 and len(notes) == 3
    assert [f"{figure.what}: {figure.error:+.1%}" for figure in figures if not figure.is_met] == []


@pytest.mark.validation
def test_steps_that_took_half_as_long_are_noticed(data: dict[str, Any]) -> None:
    changed = copy.deepcopy(data)
    for run in changed["runs"]:
        for request in run["requests"]:
            request["end_s"] = request["first_s"] + (request["end_s"] - request["first_s"]) / 2
    figures, _ = compare_all(changed, scheduler="fast")
    assert not any(figure.is_met for figure in figures if "TPOT" in figure.what)


def test_the_newest_complete_result_of_each_load_counts(data: dict[str, Any], tmp_path: Path) -> None:
    without = copy.deepcopy(data)
    for run in without["runs"]:
        run["requests"] = []
    assert is_complete(data) and not is_complete(without)
    larger = data | {"size": data["size"] | {"num_instances": 4}}
    milder = data | {"plan": data["plan"] | {"peak_share": 1.4}}
    results = {
        "overload2-x1.6-a-2026-01-01": data | {"date": "2026-01-01"},
        "overload2-x1.6-b-2026-01-02": data | {"date": "2026-01-02"},
        "overload2-x1.6-c-2026-01-03": without | {"date": "2026-01-03"},
        "overload2-x1.4-a-2026-01-01": milder | {"date": "2026-01-01"},
        "overload4-x1.6-a-2026-01-01": larger | {"date": "2026-01-01"},
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert [path.stem for path in newest_results(tmp_path)] == [
        "overload2-x1.4-a-2026-01-01",
        "overload2-x1.6-b-2026-01-02",
        "overload4-x1.6-a-2026-01-01",
    ]


def test_rounds_are_as_far_apart_as_the_farthest_is_from_the_others() -> None:
    def round_of(ttft_s: float, tpot_s: float) -> list[Record]:
        record = Record(
            at_s=1.0, prompt_tokens=5, output_tokens=11, first_s=1.0 + ttft_s, end_s=1.0 + ttft_s + 10 * tpot_s
        )
        return [record] * 3

    found = repeatability([round_of(0.1, 0.02), round_of(0.1, 0.03), round_of(0.4, 0.02)])
    assert found["P99 TTFT"] == found["P50 TTFT"] == pytest.approx(3.0)
    assert found["P50 TPOT"] == found["P99 TPOT"] == pytest.approx(0.5)


SILENT = "in two of three rounds one of vLLM's servers answered nothing for 1.2 and 4.9 s: 64 % too low"
EDGE = "demand came to about what dp holds, where a wait more or less decides"
FEW = "of its one round, whose few requests waited 26 ms more than in the run"
TIPPED = "in two of three rounds demand outgrew the pipelines, in the simulation less: 30 to 70 % too low"
FEWER = "fewer requests ran at once in the simulation, for the same reason: 15.5 % too low, where the bar is 15 %"
OUTGREW = "in one of three rounds demand outgrew the pipelines, in the simulation not: 48 % too low"
FULL = "in two of three rounds demand came to just what pipelines hold, where a wait more or less decides"
KNOWN_MISSES = {  # (load, system, figure) -> why this one figure is outside its bar; all others are guarded
    ("overload2-x1.13", "dp", "P99 TTFT"): EDGE,
    ("overload2-x1.13", "drop", "P99 TTFT"): FULL,
    ("overload2-x1.16", "drop", "P99 TTFT"): OUTGREW,
    ("overload2-x1.18", "drop", "P99 TTFT"): TIPPED,
    ("overload2-x1.6", "drop", "P99 TTFT"): TIPPED,
    ("overload2-x1.6", "drop", "P50 TPOT"): FEWER,
    ("overload2-x1.55", "vllm-dp", "P50 TTFT"): FEW,
    ("overload2-x1.55", "vllm-dp", "P99 TTFT"): EDGE,
    ("overload2-x1.5", "vllm-dp", "P99 TTFT"): EDGE,
    ("overload2-x1.5", "dp", "P99 TTFT"): EDGE,
    ("overload2-x1.45", "vllm-dp", "P99 TTFT"): EDGE,
    ("overload2-x1.45", "dp", "P99 TTFT"): EDGE,
    ("overload4-x1.16", "vllm-dp", "P99 TTFT"): SILENT,
}
RESULTS = {"-".join(path.stem.split("-")[:2]): path for path in newest_results()}  # by load


def misses(load: str) -> dict[tuple[str, str, str], str]:
    """Figures of a load's newest result that are outside their bars, with their errors."""
    found, _ = compare_all(read_result(RESULTS[load]))
    assert len(found) == 4 * len(SIMULATED)
    missed = {}
    for figure in found:
        _, _, rest = figure.what.partition("instances, ")
        system, _, what = rest.partition(": ")
        if not figure.is_met:
            missed[load, system, what] = f"{figure.error:+.1%}"
    return missed


@pytest.mark.validation
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("load", RESULTS)
def test_the_newest_real_runs_are_within_the_bars_but_for_the_figures_that_are_known(load: str) -> None:
    known = {miss for miss in KNOWN_MISSES if miss[0] == load}
    assert set(found := misses(load)) == known, found


def test_every_known_miss_is_of_a_result_that_is_there() -> None:
    assert {load for load, _, _ in KNOWN_MISSES} <= set(RESULTS)
    assert {system for _, system, _ in KNOWN_MISSES} <= set(SIMULATED)
