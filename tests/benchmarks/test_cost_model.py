"""Laws of the cost model benchmark's figures, and one small run of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cost_model import report
from benchmarks.cost_model.measure import Load, Plan, Result, evaluate, held_back_errors, measure
from benchmarks.result_files import read_result
from pengserve.planners.cost_model import fit
from pengserve.simulator.profiling import kind_of
from tests.support.models import tiny_model
from tests.support.timed_steps import samples

PLAN = Plan(model=Path("model"), load=Load(num_requests=30, max_running=16), stages=(2,))


@pytest.fixture(scope="module")
def result() -> Result:
    return evaluate(PLAN, samples())


def test_errors_are_those_of_batches_that_were_held_back(result: Result) -> None:
    kinds = [kind_of(sample) for sample in result.samples]
    counts = {(e.kind, e.model): e.count for e in result.errors}
    assert all(counts[kind, "with attention"] == kinds.count(kind) for kind in set(kinds))
    assert counts["all", "tokens alone"] == 60
    assert sorted(result.folds) == sorted(12 * list(range(5)))
    # Only the model that is not asked for a batch knows its time.
    spoiled = list(result.samples)
    spoiled[0] = replace(spoiled[0], seconds=9.0)
    before, after = (held_back_errors(fit, each, result.folds) for each in (result.samples, spoiled))
    own = [index for index, fold in enumerate(result.folds) if fold == result.folds[0]]
    others = [index for index in range(60) if index not in own]
    assert all(after[index] == before[index] for index in own[1:])
    assert after[0] > 0.9
    assert all(after[index] > before[index] for index in others)


def test_ours_is_exact_where_the_model_is_true_and_tokens_alone_are_not(result: Result) -> None:
    by_model = {e.model: e for e in result.errors if e.kind == "all"}
    assert by_model["with attention"].worst < 1e-6 < 0.1 < by_model["tokens alone"].mean


def test_aims_are_judged_by_all_figures(result: Result) -> None:
    assert report.is_met(result)
    assert all(": met" in sentence for sentence in report.aims(result))
    baseline, lookahead = result.formations
    worse = replace(result, formations=(baseline, replace(lookahead, queued=baseline.queued)))
    assert not report.is_met(worse) and "not met" in report.aims(worse)[1]
    off = replace(result, errors=tuple(replace(e, mean=e.mean + 0.06) for e in result.errors))
    assert not report.is_met(off) and "not met" in report.aims(off)[0]


def test_a_result_is_written_with_all_that_was_measured(result: Result, tmp_path: Path) -> None:
    json_path, text_path = report.write(tmp_path, PLAN, result, "2000-01-01")
    record = read_result(json_path)["result"]
    assert len(record["samples"]) == 60 and record["folds"] == list(result.folds)
    chunk = result.samples[0].chunks[0]
    assert record["samples"][0]["chunks"][0] == [chunk.prefix_tokens, chunk.num_tokens]
    text = text_path.read_text()
    assert "token count" in text and "lookahead" in text and "kv_read_s" in text
    assert all(len(row) == len(report.ERROR_HEADING) for row in report.error_rows(result))
    assert all(len(row) == len(report.BUBBLE_HEADING) for row in report.bubble_rows(result))


@pytest.mark.validation
def test_a_small_run_times_every_batch() -> None:
    plan = replace(PLAN, model=tiny_model(), num_batches=24, rounds=2, repetitions=1)
    steps = 0

    def on_step() -> None:
        nonlocal steps
        steps += 1

    timed = measure(plan, on_step)
    assert (len(timed), steps) == (24, 48)
    assert all(sample.seconds > 0 for sample in timed)
    assert {kind_of(sample) for sample in timed} == {"decodes", "prefill", "both"}
    assert evaluate(plan, timed).errors[0].mean < 1.0
