"""The public traces, where they are present: the figures of the table that describes them."""

from pathlib import Path

import pytest

from pengserve.simulator.traces.kv_demand import StayModel, demand_of
from pengserve.simulator.traces.loading import load, load_lengths, read
from tests.support.trace_statistics import statistics_of

SHARED = Path(__file__).parents[3].parent / "shared"
TRACES = SHARED / "traces"

pytestmark = pytest.mark.skipif(not TRACES.is_dir(), reason="the public traces are not here")


@pytest.mark.parametrize(
    ("file", "rows", "span_s", "prompt", "output", "cv", "peak_over_mean"),
    [
        ("azure2023/azure_conv_norm.csv", 19_366, 3_502, (1155, 4142), (211, 601), 1.09, 1.78),
        ("mooncake/synthetic_trace.jsonl", 3_993, 1_022, (15326, 66456), (149, 768), 1.01, 1.42),
        ("servegen/deepseek-r1_peak1h.csv.gz", 130_731, 3_600, (678, 12412), (821, 5279), 1.29, 1.49),
        ("aibrix/8min_up_and_down.csv", 2_026, 456, (294, 789), (73, 559), 1.81, 3.22),
    ],
)
def test_figures_are_those_of_the_table(
    file: str,
    rows: int,
    span_s: float,
    prompt: tuple[float, float],
    output: tuple[float, float],
    cv: float,
    peak_over_mean: float,
) -> None:
    loaded = read(TRACES / file)
    figures = statistics_of(loaded.arrivals)
    assert figures.num_requests + loaded.num_left_out == rows
    assert figures.span_s == pytest.approx(span_s, abs=0.5)
    # The table counts two requests of aibrix that generated nothing, and cuts some figures off: 1 and 0.01 more.
    assert (figures.prompt.mean, figures.prompt.p99) == pytest.approx(prompt, abs=1.01)
    assert (figures.output.mean, figures.output.p99) == pytest.approx(output, abs=1.01)
    assert figures.gap_cv == pytest.approx(cv, abs=0.01)
    assert figures.peak_over_mean == pytest.approx(peak_over_mean, abs=0.01)


def test_a_conversation_trace_never_overloads_twice_its_mean_demand() -> None:
    demand = demand_of(
        load(TRACES / "azure2023" / "azure_conv_norm.csv"), StayModel(prefill_s_per_token=1e-4, tpot_s=0.04)
    )
    assert demand.peak_over_mean == pytest.approx(1.8, abs=0.1)


def test_all_other_public_files_load() -> None:
    for file in ("BurstGPT_1_dense_120.csv", "BurstGPT_1_span30s_120.csv"):
        assert len(load(TRACES / "burstgpt" / file)) == 120
    assert read(TRACES / "burstgpt" / "burstgpt_sample_energy2.csv").num_left_out == 3
    assert len(load(TRACES / "orbitflow" / "orbitflow_traces.csv.gz", step_s=0.03, trace_id="0")) == 100
    assert len(load_lengths(TRACES / "lengths" / "arxiv_summarization_lengths.csv")) == 28_257
    assert len(load(TRACES / "lengths" / "sharegpt-qwen3-32b-300-sps10.csv")) == 300


def test_a_recorded_run_starts_at_zero_and_keeps_its_names() -> None:
    run = SHARED / "profiles" / "overload_runs" / "RTX4090" / "Llama-3.1-8B" / "requests.jsonl"
    arrivals = load(run)
    assert len(arrivals) == 300
    assert (arrivals[0].at_s, arrivals[0].request_id) == (0.0, "bench-0")
    assert arrivals[-1].at_s == pytest.approx(29.1, abs=0.1)
