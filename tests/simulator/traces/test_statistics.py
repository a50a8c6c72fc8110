"""Statistics: figures of traces that can be counted by hand."""

import pytest

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.kv_demand import StayModel
from tests.support.trace_statistics import statistics_of


def trace_at(*times: float) -> tuple[Arrival, ...]:
    return tuple(
        Arrival(request_id=f"r{i}", at_s=at_s, prompt_tokens=10 * (i + 1), output_tokens=5)
        for i, at_s in enumerate(times)
    )


def test_figures_of_a_small_trace() -> None:
    figures = statistics_of(trace_at(100, 101, 103, 120))  # gaps 1, 2, 17
    assert (figures.num_requests, figures.span_s, figures.rate_per_s) == (4, 20.0, 0.2)
    assert figures.gap_cv == pytest.approx(
        (((1 - 20 / 3) ** 2 + (2 - 20 / 3) ** 2 + (17 - 20 / 3) ** 2) / 3) ** 0.5 / (20 / 3)
    )
    assert figures.peak_rate_per_s == 0.3
    assert figures.peak_over_mean == pytest.approx(3 / (4 / 3))  # windows of 3, 0 and 1
    assert (figures.prompt.mean, figures.prompt.longest) == (25.0, 40)
    assert (figures.output.mean, figures.output.p99, figures.output.longest) == (5.0, 5.0, 5)


def test_even_arrivals_have_no_burstiness() -> None:
    figures = statistics_of(trace_at(*range(100)))
    assert figures.gap_cv == pytest.approx(0.0)
    assert figures.peak_over_mean == pytest.approx(1.0)


def test_a_single_request_has_no_rate() -> None:
    figures = statistics_of(trace_at(3))
    assert (figures.span_s, figures.rate_per_s, figures.gap_cv) == (0.0, None, None)
    assert ("mean rate", "-") in figures.rows()


def test_the_table_has_a_row_for_demand_where_stays_are_known() -> None:
    trace = trace_at(0, 1, 2)
    without = statistics_of(trace).rows()
    rows = statistics_of(trace, stay=StayModel(prefill_s_per_token=0.0, tpot_s=0.1)).rows()
    assert rows[: len(without)] == without
    assert [name for name, _ in rows[len(without) :]] == ["KV demand mean / peak", "KV demand peak / mean"]


def test_a_window_without_length_is_refused() -> None:
    with pytest.raises(ConfigError, match="window_s must be a number above 0, got 0"):
        statistics_of(trace_at(0, 1), window_s=0)
