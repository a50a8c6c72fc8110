"""Generators: the same seed is the same trace, and the traffic is what was asked for."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.traces.config import GENERATORS
from pengserve.simulator.traces.generators.base import Generator
from pengserve.simulator.traces.generators.burstgpt import BURSTGPT_LENGTHS, BURSTGPT_STAY, BurstGpt, ExtremeBurst
from pengserve.simulator.traces.generators.conversations import MultiTurn
from pengserve.simulator.traces.generators.flying import Flying, PriorityMix
from pengserve.simulator.traces.generators.lengths import LognormalLengths, SampledLengths, UniformLengths
from pengserve.simulator.traces.generators.rates import RateCurve
from pengserve.simulator.traces.generators.steady import Gamma, Poisson, Ramp
from pengserve.simulator.traces.kv_demand import curve_of, demand_of
from tests.support.effort import examples
from tests.support.trace_statistics import statistics_of

SHORT = UniformLengths(prompt=(5, 50), output=(1, 20))
KINDS: list[Generator] = [
    Poisson(rate_per_s=5, duration_s=60),
    Gamma(rate_per_s=5, duration_s=60, cv=2),
    Ramp(points=((0, 1), (30, 9), (60, 1))),
    BurstGpt(rate_per_s=1),
    ExtremeBurst(rate_per_s=1),
    Flying(num_requests=300),
    PriorityMix(duration_s=60),
    MultiTurn(conversations_per_s=1, duration_s=60),
]


def test_every_generator_is_tried_here() -> None:
    assert {type(kind) for kind in KINDS} == set(GENERATORS.values())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_a_trace_depends_on_its_seed_alone(kind: Generator) -> None:
    assert kind.generate(SHORT, 1) == kind.generate(SHORT, 1)
    assert kind.generate(SHORT, 1) != kind.generate(SHORT, 2)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
def test_a_trace_is_in_order_and_its_names_differ(kind: Generator) -> None:
    trace = kind.generate(SHORT, 3)
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(trace))
    assert len({request.request_id for request in trace}) == len(trace)
    assert all(request.at_s >= 0 and request.prompt_tokens >= 1 and request.output_tokens >= 1 for request in trace)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not isinstance(kind, MultiTurn)], ids=lambda k: type(k).__name__
)
def test_other_lengths_leave_the_arrivals(kind: Generator) -> None:
    other = LognormalLengths(prompt_mean=100, prompt_p99=500, output_mean=100, output_p99=500)
    assert [r.at_s for r in kind.generate(SHORT, 4)] == [r.at_s for r in kind.generate(other, 4)]


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.5])
def test_gamma_has_the_rate_and_the_burstiness_asked_for(cv: float) -> None:
    figures = statistics_of(Gamma(rate_per_s=20, duration_s=1000, cv=cv).generate(SHORT, 5))
    assert figures.num_requests == pytest.approx(20_000, rel=0.05)
    assert figures.gap_cv == pytest.approx(cv, rel=0.05)


def test_a_ramp_follows_its_points() -> None:
    at_s = np.array([r.at_s for r in Ramp(points=((0, 0), (100, 40), (100, 10), (200, 10))).generate(SHORT, 6)])
    counts = np.histogram(at_s, bins=[0, 50, 100, 200])[0]
    assert counts == pytest.approx([500, 1500, 1000], rel=0.1)


@settings(max_examples=examples(50))
@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 50), st.floats(0, 50)), min_size=1, max_size=6),
    st.floats(0, 1, exclude_max=True),
)
def test_a_curve_maps_counts_back_to_the_time_at_which_they_are_expected(
    sections: list[tuple[float, float, float]], part: float
) -> None:
    ends = list(itertools.accumulate(seconds for seconds, _, _ in sections))
    points = [
        point
        for (seconds, first, last), end in zip(sections, ends, strict=True)
        for point in ((end - seconds, first), (end, last))
    ]
    points[0] = (0.0, points[0][1])
    points = sorted(points, key=lambda point: point[0])
    if sum(rate for _, rate in points) < 0.1:
        return
    curve = RateCurve(tuple(points))
    wanted = part * curve.expected[-1]
    (at_s,) = curve.at(np.array([wanted]))
    times, rates = np.array(points).T
    grid = np.append(times[times < at_s], at_s)
    integral = sum(
        (stop - start) * (rates[i] + _rate(points, i, stop)) / 2
        for i, (start, stop) in enumerate(itertools.pairwise(grid))
    )
    assert integral == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def _rate(points: list[tuple[float, float]], section: int, at_s: float) -> float:
    (start_s, first), (stop_s, last) = points[section], points[section + 1]
    return last if stop_s <= start_s else first + (last - first) * (at_s - start_s) / (stop_s - start_s)


def test_uniform_lengths_include_both_ends() -> None:
    prompts, outputs = UniformLengths(prompt=(3, 5), output=(1, 2)).draw(np.random.default_rng(0), 1000)
    assert set(prompts) == {3, 4, 5}
    assert set(outputs) == {1, 2}


def test_lognormal_lengths_have_the_mean_and_the_p99_asked_for() -> None:
    lengths = LognormalLengths(prompt_mean=1155, prompt_p99=4142, output_mean=211, output_p99=601)
    prompts, outputs = lengths.draw(np.random.default_rng(0), 200_000)
    assert (prompts.mean(), np.percentile(prompts, 99)) == pytest.approx((1155, 4142), rel=0.03)
    assert (outputs.mean(), np.percentile(outputs, 99)) == pytest.approx((211, 601), rel=0.03)


@pytest.mark.parametrize("p99", [99, 1500])
def test_lengths_that_no_lognormal_has_are_refused(p99: float) -> None:
    with pytest.raises(ConfigError, match=r"prompt_p99 must be from 1 to 15\.0 times prompt_mean"):
        LognormalLengths(prompt_mean=100, prompt_p99=p99, output_mean=10, output_p99=20)


def test_sampled_lengths_keep_prompt_and_output_together() -> None:
    pairs = ((10, 1), (20, 2), (30, 3))
    prompts, outputs = SampledLengths(pairs).draw(np.random.default_rng(0), 500)
    assert set(zip(prompts.tolist(), outputs.tolist(), strict=True)) == set(pairs)


def test_burstgpt_has_the_rate_asked_for_and_doubles_it_at_45_s() -> None:
    trace = BurstGpt(rate_per_s=40).generate(BURSTGPT_LENGTHS, 7)
    assert len(trace) == pytest.approx(40 * 640, rel=0.03)
    before = sum(r.at_s < 45 for r in trace) / 45
    burst = sum(45 <= r.at_s < 85 for r in trace) / 40
    assert burst / before == pytest.approx(2.0, rel=0.1)


def test_burstgpt_lengths_and_stays_are_those_of_the_paper() -> None:
    prompts, outputs = BURSTGPT_LENGTHS.draw(np.random.default_rng(0), 200_000)
    assert (prompts.mean(), outputs.mean()) == pytest.approx((642, 262), rel=0.05)
    _, stays_s = BURSTGPT_STAY.seconds(prompts, outputs)
    assert stays_s.mean() == pytest.approx(11.0, rel=0.05)
    assert stays_s.std() == pytest.approx(14.9, rel=0.15)
    assert stays_s.max() == pytest.approx(150.0, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_burstgpt_overloads_a_cluster_of_twice_its_mean_demand_in_its_two_bursts_alone(seed: int) -> None:
    trace = BurstGpt(rate_per_s=30).generate(BURSTGPT_LENGTHS, seed)
    capacity = 2.1 * demand_of(trace, BURSTGPT_STAY).mean_tokens
    moments = np.arange(0.0, 640.0)
    over = moments[curve_of(trace, BURSTGPT_STAY).at(moments) > capacity]
    assert any(45 <= at_s < 105 for at_s in over)
    assert any(440 <= at_s < 500 for at_s in over)
    assert all(45 <= at_s < 105 or 440 <= at_s < 500 for at_s in over)


def test_an_extreme_burst_repeats_the_first_one() -> None:
    trace = ExtremeBurst(rate_per_s=20, duration_s=125).generate(BURSTGPT_LENGTHS, 8)
    first = [r for r in trace if 45 <= r.at_s < 85]
    second = [r for r in trace if 85 <= r.at_s < 125]
    assert [round(r.at_s + 40, 6) for r in first] == [r.at_s for r in second]
    assert [r.prompt_tokens for r in first] == [r.prompt_tokens for r in second]


def test_flying_alternates_low_load_and_bursts() -> None:
    kind = Flying()
    trace = kind.generate(UniformLengths(prompt=(128, 4000), output=(64, 512)), 9)
    assert len(trace) == 4000
    at_s = np.array([r.at_s for r in trace])
    edges = np.cumsum([0.0] + [60.0, 30.0] * 10)
    edges = edges[edges <= at_s[-1]]
    rates = np.histogram(at_s, edges)[0] / np.diff(edges)
    assert len(rates) >= 6
    assert all(1.4 < rate < 6 for rate in rates[::2])  # three deviations of a count around 2 to 5 a second
    assert all(8 < rate < 33 for rate in rates[1::2])


def test_a_share_of_a_priority_mix_is_urgent_and_asks_for_its_degree() -> None:
    trace = PriorityMix(duration_s=2000, priority_share=0.3, degree=8).generate(SHORT, 10)
    urgent = [r for r in trace if r.priority == -1]
    assert len(urgent) / len(trace) == pytest.approx(0.3, abs=0.03)
    assert {r.degree for r in urgent} == {8}
    assert {(r.priority, r.degree) for r in trace if r.priority != -1} == {(0, None)}
    assert 3 <= len(trace) / 2000 <= 5


def test_turns_go_on_from_what_was_said_before() -> None:
    kind = MultiTurn(conversations_per_s=1, duration_s=100, system_tokens=40, prefix_block=8, max_tokens=600)
    trace = kind.generate(UniformLengths(prompt=(5, 50), output=(1, 60)), 11)
    by_name = {request.request_id: request for request in trace}
    followed = 0
    for request in trace:
        assert len(request.prefix_ids) == request.prompt_tokens // 8
        assert request.prompt_tokens + request.output_tokens <= 600
        conversation, turn = request.request_id.split(".")
        following = by_name.get(f"{conversation}.{int(turn) + 1}")
        if following is not None:
            followed += 1
            assert following.prefix_ids[: len(request.prefix_ids)] == request.prefix_ids
            assert following.prompt_tokens > request.prompt_tokens + request.output_tokens
            assert following.at_s >= request.at_s + 0.04 * request.output_tokens - 1e-5
    assert followed > 50


def test_conversations_share_the_system_prompt_and_nothing_else() -> None:
    kind = MultiTurn(conversations_per_s=1, duration_s=60, system_tokens=40, prefix_block=8)
    firsts = [
        r for r in kind.generate(UniformLengths(prompt=(20, 50), output=(1, 9)), 12) if r.request_id.endswith(".0")
    ]
    for one, other in itertools.combinations(firsts, 2):
        assert set(one.prefix_ids) & set(other.prefix_ids) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("kind", "fields", "sentence"),
    [
        (Poisson, {"rate_per_s": 0, "duration_s": 1}, "rate_per_s must be a number above 0, got 0"),
        (Gamma, {"rate_per_s": 1, "duration_s": 1, "cv": float("nan")}, "cv must be a number above 0, got nan"),
        (Ramp, {"points": ((0, 1),)}, "points must be two or more"),
        (Ramp, {"points": ((0, 0), (9, 0))}, "not all of them 0"),
        (Ramp, {"points": ((0, 1), (9, -1))}, "rates of 0 or more"),
        (BurstGpt, {"rate_per_s": 1, "burst_starts_s": (45, 60)}, "burst_starts_s must be in order and leave room"),
        (BurstGpt, {"rate_per_s": 1, "burst_over_mean": 9}, "burst_over_mean must be lower"),
        (ExtremeBurst, {"rate_per_s": 1, "duration_s": 60}, "duration_s must be above the end of the first burst"),
        (Flying, {"low_rate_per_s": (5, 2)}, "low_rate_per_s must be two numbers above 0, the lower one first"),
        (PriorityMix, {"priority_share": 1.5}, "priority_share must be from 0 to 1, got 1.5"),
        (MultiTurn, {"conversations_per_s": 1, "duration_s": 1, "mean_turns": 0}, "mean_turns must be a number, 1"),
    ],
)
def test_impossible_traffic_names_the_field(kind: type, fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        kind(**fields)


def test_traffic_without_a_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request arrives"):
        Poisson(rate_per_s=1e-9, duration_s=1).generate(SHORT, 0)
    with pytest.raises(ConfigError, match="seed must be a whole number, 0 or more"):
        Poisson(rate_per_s=1, duration_s=10).generate(SHORT, -1)
