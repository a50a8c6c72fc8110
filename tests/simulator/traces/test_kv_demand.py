"""The demand for KV: equal to adding up every request at every moment."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.kv_demand import StayModel, curve_of, demand_of, demand_of_stays
from tests.support.effort import examples

STAY = StayModel(prefill_s_per_token=0.01, tpot_s=0.1)


def trace_of(rows: list[tuple[float, int, int]]) -> tuple[Arrival, ...]:
    return tuple(
        Arrival(request_id=f"r{i}", at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        for i, (at_s, prompt_tokens, output_tokens) in enumerate(sorted(rows))
    )


def held(request: Arrival, moment_s: float) -> float:
    first_s = request.at_s + 0.01 * request.prompt_tokens
    end_s = first_s + 0.1 * request.output_tokens
    if not request.at_s <= moment_s < end_s:
        return 0.0
    return request.prompt_tokens + max(0.0, (moment_s - first_s) / 0.1)


TRACES = st.lists(st.tuples(st.floats(0, 50), st.integers(1, 500), st.integers(1, 200)), min_size=1, max_size=30)


@settings(max_examples=examples(100))
@given(TRACES, st.floats(0, 80))
def test_the_curve_is_the_sum_over_all_requests(rows: list[tuple[float, int, int]], moment_s: float) -> None:
    trace = trace_of(rows)
    edges = [edge for r in trace for edge in (r.at_s, r.at_s + 0.01 * r.prompt_tokens + 0.1 * r.output_tokens)]
    if any(abs(edge - moment_s) < 1e-6 for edge in edges):
        return
    assert curve_of(trace, STAY).at([moment_s])[0] == pytest.approx(sum(held(r, moment_s) for r in trace), abs=1e-3)


@settings(max_examples=examples(50))
@given(TRACES)
def test_no_moment_exceeds_the_peak(rows: list[tuple[float, int, int]]) -> None:
    trace = trace_of(rows)
    demand = demand_of(trace, STAY)
    moments = [i / 4 for i in range(400)]
    assert max(sum(held(r, moment_s) for r in trace) for moment_s in moments) <= demand.peak_tokens + 1e-3


def test_one_request_holds_its_prompt_and_what_it_has_generated() -> None:
    demand = demand_of(trace_of([(2.0, 100, 50)]), STAY)
    assert demand.peak_tokens == pytest.approx(150)
    assert demand.peak_at_s == pytest.approx(2.0 + 1.0 + 5.0)
    assert demand.mean_tokens == pytest.approx((1.0 * 100 + 5.0 * 125) / 6.0)


def test_the_mean_is_over_the_time_in_which_requests_arrive() -> None:
    demand = demand_of(trace_of([(0.0, 100, 10), (20.0, 100, 10)]), STAY)
    assert demand.mean_tokens == pytest.approx((1.0 * 100 + 1.0 * 105) / 20.0)


def test_known_times_give_what_a_model_with_the_same_times_gives() -> None:
    trace = trace_of([(0.0, 100, 10), (0.5, 300, 40), (1.0, 50, 7)])
    first_s = [r.at_s + 0.01 * r.prompt_tokens for r in trace]
    end_s = [first + 0.1 * r.output_tokens for first, r in zip(first_s, trace, strict=True)]
    known, modelled = demand_of_stays(trace, first_s, end_s), demand_of(trace, STAY)
    assert known.mean_tokens == pytest.approx(modelled.mean_tokens)
    assert known.peak_tokens == pytest.approx(modelled.peak_tokens)


def test_an_output_that_comes_at_once_is_held_at_once() -> None:
    demand = demand_of_stays(trace_of([(0.0, 100, 10)]), [1.0], [1.0])
    assert demand.peak_tokens == pytest.approx(110)


def test_impossible_times_are_refused() -> None:
    trace = trace_of([(5.0, 100, 10)])
    with pytest.raises(ConfigError, match="an arrival, a first token and an end, in this order"):
        demand_of_stays(trace, [4.0], [6.0])
    with pytest.raises(ConfigError, match="tpot_s must be a number above 0, got 0"):
        StayModel(prefill_s_per_token=0, tpot_s=0)
