"""Laws of figures: they equal what a plain count over the requests gives."""

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.types.events import Event, EventKind
from pengserve.simulator.reports.figures import base_of, figures_of, gaps_spread, spread
from pengserve.simulator.reports.layouts import drop_periods, layout_spans
from pengserve.simulator.reports.slo import SloBase, attainment, gaps_within
from pengserve.simulator.requests import Outcome
from pengserve.simulator.result import Gaps, Result
from tests.simulator.reports.results import DP, PP, moment, outcome, result

values = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=60)


@given(values)
def test_a_spread_is_numpys(given_values: list[float]) -> None:
    found = spread(given_values)
    assert found is not None and found.count == len(given_values)
    expected = [float(np.percentile(given_values, percent)) for percent in (50, 90, 99, 99.9)]
    assert [found.p50, found.p90, found.p99, found.p999] == pytest.approx(expected)
    assert found.mean == pytest.approx(sum(given_values) / len(given_values))
    assert found.maximum == max(given_values)


def test_of_nothing_there_is_no_figure() -> None:
    figures = figures_of(result(outcomes=(), moments=(), end_s=0.0, gaps=Gaps(edges_s=(1.0, 2.0), counts=(0,))))
    assert (figures.ttft_s, figures.tbt_s, figures.kv_use_mean, figures.requests_per_s) == (None, None, None, 0.0)
    assert base_of([result(outcomes=())]) is None


def random_run(seed: int) -> Result:
    """A few requests of every fate."""
    rng = random.Random(seed)
    outcomes = []
    for number in range(rng.randint(1, 40)):
        fate = rng.choice(["well", "well", "refused", "unscheduled", "cut"])
        changes: dict[str, Any] = {"num_preemptions": rng.randint(0, 2), "num_moves": rng.randint(0, 2)}
        if fate in ("refused", "unscheduled"):
            changes |= {"scheduled_s": None, "first_token_s": None, "end_s": None, "output_tokens": 0}
            changes |= {"refused": "no room"} if fate == "refused" else {}
        elif fate == "cut":
            changes |= {"end_s": None, "output_tokens": rng.randint(1, 5)}
        else:
            first_s = number + rng.random() * 3
            tokens = rng.randint(1, 20)
            changes |= {
                "first_token_s": first_s,
                "output_tokens": tokens,
                "end_s": first_s + rng.random() * (tokens > 1),
                "cached_tokens": rng.choice([0, 16, 64]),
            }
        outcomes.append(outcome(number, **changes))
    return result(outcomes=tuple(outcomes), end_s=50.0)


@pytest.mark.parametrize("seed", range(8))
def test_counts_and_rates_equal_a_plain_count(seed: int) -> None:
    run = random_run(seed)
    figures, outcomes = figures_of(run), run.outcomes
    assert figures.num_requests == figures.num_finished + figures.num_refused + figures.num_unfinished == len(outcomes)
    assert figures.num_finished == len([o for o in outcomes if o.end_s is not None])
    assert figures.num_refused == len([o for o in outcomes if o.refused])
    assert figures.requests_per_s == figures.num_finished / 50
    assert figures.output_tokens_per_s == sum(o.output_tokens for o in outcomes) / 50
    served = [o for o in outcomes if o.first_token_s is not None]
    assert figures.total_tokens_per_s == sum(o.output_tokens for o in outcomes) / 50 + 100 * len(served) / 50
    assert figures.num_preemptions == sum(o.num_preemptions for o in outcomes)
    cached = sum(o.cached_tokens for o in served)
    assert figures.cached_share == (cached / (100 * len(served)) if served else None)
    assert (0 if figures.ttft_s is None else figures.ttft_s.count) == len(served)


def is_good(found: Outcome, ttft_s: float, tpot_s: float) -> bool:
    """As the paper says it, spelt out."""
    if found.first_token_s is None or found.end_s is None or found.first_token_s - found.arrived_s > ttft_s:
        return False
    return found.output_tokens < 2 or (found.end_s - found.first_token_s) / (found.output_tokens - 1) <= tpot_s


@pytest.mark.parametrize("seed", range(8))
def test_attainment_equals_a_plain_count(seed: int) -> None:
    run = random_run(seed)
    for point in attainment(run.outcomes, SloBase(ttft_s=0.2, tpot_s=0.01), run.end_s):
        good = sum(is_good(o, 0.2 * point.scale, 0.01 * point.scale) for o in run.outcomes)
        assert point.attained == good / len(run.outcomes)
        assert point.goodput_per_s == good / run.end_s


@pytest.mark.parametrize("seed", range(4))
def test_looser_limits_never_attain_less(seed: int) -> None:
    run = random_run(seed)
    points = attainment(run.outcomes, SloBase(ttft_s=0.1, tpot_s=0.005), run.end_s)
    shares = [point.attained for point in points]
    assert shares == sorted(shares) and [point.scale for point in points] == list(range(1, 11))


def test_limits_come_from_the_configuration_before_any_run() -> None:
    base = base_of([result(config={"slo": {"ttft_s": 2, "tpot_s": None}})])
    assert base is not None and (base.ttft_s, base.tpot_s) == (2.0, None)


def test_limits_come_from_the_best_baseline_and_not_from_pengserve() -> None:
    def run(policy: str, ttft_s: float) -> Result:
        return result(policy=policy, outcomes=(outcome(0, first_token_s=ttft_s, end_s=ttft_s + 1.0),))

    base = base_of([run("pengserve", 0.1), run("vllm_dp", 0.4), run("vllm_tp", 0.3)])
    assert base is not None and (base.ttft_s, base.tpot_s) == (pytest.approx(0.3), pytest.approx(0.1))


@given(st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=300))
def test_a_histogram_tells_percentiles_to_a_bin(gaps: list[float]) -> None:
    edges = tuple(1e-3 * 10 ** (index / 20) for index in range(82))
    counts, _ = np.histogram(gaps, edges)
    found = gaps_spread(Gaps(edges_s=edges, counts=tuple(int(count) for count in counts)))
    assert found is not None and found.count == len(gaps)
    width = 10 ** (1 / 20) * (1 + 1e-9)
    for percent, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        exact = float(np.percentile(gaps, percent, method="inverted_cdf"))
        assert exact / width <= value <= exact * width
    assert max(gaps) <= found.maximum <= max(gaps) * width
    assert found.mean == pytest.approx(sum(gaps) / len(gaps), rel=width - 1)


def test_use_of_memory_is_weighted_by_time() -> None:
    run = result(moments=(moment(0.0, used_tokens=100), moment(9.0, used_tokens=1000, demand_tokens=1500)), end_s=10.0)
    figures = figures_of(run)
    assert (figures.kv_use_mean, figures.kv_use_peak, figures.demand_peak) == (pytest.approx(0.19), 1.0, 1.5)


def test_time_in_layouts_is_all_time_and_each_shape_its_share() -> None:
    figures = figures_of(result())
    assert [(found.layout, found.seconds) for found in figures.layouts] == [("4 dp", 10.0), ("1 pp2 + 2 dp", 2.0)]
    assert dict(figures.shape_shares) == {"dp": pytest.approx(11 / 12), "pp2": pytest.approx(1 / 12)}
    assert (figures.drops, figures.num_switches) == (((4.0, 6.0),), 2)


def test_layouts_between_two_samples_are_known_from_the_events() -> None:
    def event(seq: int, at_s: float, groups: str) -> Event:
        return Event(seq=seq, time_s=at_s, kind=EventKind.LAYOUT_CHANGED, data={"groups": groups})

    texts = [text.replace(") ", "), ") for text in (DP, PP)]
    events = (event(1, -2.0, texts[1]), event(2, -1.0, texts[0]), event(3, 4.25, texts[1]), event(4, 4.5, texts[0]))
    assert figures_of(result(events=events)).drops == ((4.25, 4.5),)
    cut = event(3, 4.25, texts[1] + " and 9 more")
    assert figures_of(result(events=(*events[:2], cut))).drops == ((4.0, 6.0),)  # the moments say so


def test_what_stays_dropped_ends_with_the_run_and_neighbours_are_one_period() -> None:
    other = "pp4@(0,1,2,3)"
    groups = [DP, PP, other, DP, PP]
    run = result(moments=tuple(moment(float(at), groups=text) for at, text in enumerate(groups)), end_s=9.0)
    assert drop_periods(layout_spans(run)) == ((1.0, 3.0), (4.0, 9.0))


def test_static_pipelines_drop_nothing() -> None:
    assert figures_of(result(moments=(moment(0.0, groups=PP), moment(5.0, groups=PP)))).drops == ()


@given(st.lists(st.integers(0, 50), min_size=3, max_size=8), st.data())
def test_the_share_of_gaps_within_a_limit_is_a_count(counts: list[int], data: st.DataObject) -> None:
    edges = tuple(0.01 * 2**index for index in range(len(counts) + 1))
    gaps = Gaps(edges_s=edges, counts=tuple(counts))
    for index, edge in enumerate(edges):
        share = gaps_within(gaps, edge)
        assert share == (pytest.approx(sum(counts[:index]) / sum(counts)) if sum(counts) else None)
    low, high = sorted(data.draw(st.tuples(st.floats(1e-3, 10), st.floats(1e-3, 10))))
    assert not sum(counts) or (gaps_within(gaps, low) or 0.0) <= (gaps_within(gaps, high) or 0.0) + 1e-9


def test_tokens_within_their_slo_are_counted_with_and_without_a_deposit() -> None:
    one = dataclasses.replace(outcome(0), output_tokens=11, num_late=4, num_late_paced=1)
    found = figures_of(result(outcomes=(one,), config={"slo": {"tbt_s": 0.1}}))
    assert (found.tbt_attained, found.tbt_attained_paced) == (pytest.approx(0.6), pytest.approx(0.9))
    assert figures_of(result(outcomes=(one,), config={})).tbt_attained is None


def test_limits_between_tokens_scale_like_the_others() -> None:
    gaps = Gaps(edges_s=(0.01, 0.1, 1.0), counts=(30, 10))
    base = base_of([result(config={"slo": {"tbt_s": 0.1}})])
    assert base is not None and base.tbt_s == 0.1
    points = attainment((outcome(0),), base, 1.0, gaps=gaps)
    assert points[0].tbt_attained == pytest.approx(0.75)
    assert points[-1].tbt_attained == pytest.approx(1.0)
