"""Windows, clips and rates: what is changed, and that nothing else is."""

import itertools
import re

import pytest

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.generators.lengths import SampledLengths, UniformLengths
from pengserve.simulator.traces.generators.steady import Gamma, Poisson
from pengserve.simulator.traces.transforms import clip, repeat, scale_rate, window, with_lengths
from tests.support.trace_statistics import statistics_of

LENGTHS = UniformLengths(prompt=(5, 50), output=(1, 20))
TRACE = Poisson(rate_per_s=10, duration_s=200).generate(LENGTHS, 0)


def request(at_s: float, prompt_tokens: int = 10, output_tokens: int = 5, prefix_ids: tuple[int, ...] = ()) -> Arrival:
    return Arrival(
        request_id=f"at{at_s:g}",
        at_s=at_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefix_ids=prefix_ids,
        prefix_block=4 if prefix_ids else 0,
    )


def test_a_window_keeps_its_start_and_not_its_stop_and_shifts_to_zero() -> None:
    trace = (request(1), request(2), request(3), request(4))
    assert [(r.request_id, r.at_s) for r in window(trace, 2, 4)] == [("at2", 0.0), ("at3", 1.0)]


def test_a_window_of_a_window_is_one_window() -> None:
    assert window(window(TRACE, 20, 120), 30, 60) == window(TRACE, 50, 80)


def test_windows_side_by_side_hold_every_request_once() -> None:
    parts = [window(TRACE, start_s, start_s + 50) for start_s in (0, 50, 100, 150)]
    assert [r.request_id for part in parts for r in part] == [r.request_id for r in TRACE]


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=re.escape("window [5, 9) s holds no request: the last one of the trace arrives at 4 s")
    ):
        window((request(4),), 5, 9)


def test_clipped_requests_fit_and_others_stay() -> None:
    trace = (request(0, 10, 5), request(1, 10, 50), request(2, 100, 5, tuple(range(25))))
    clipped = clip(trace, 32)
    assert [(r.prompt_tokens, r.output_tokens) for r in clipped] == [(10, 5), (10, 22), (31, 1)]
    assert clipped[0] is trace[0]
    assert clipped[2].prefix_ids == (0, 1, 2, 3, 4, 5, 6)  # full blocks of 4 in 31 tokens
    with pytest.raises(ConfigError, match="max_model_len must be 2 or more, got 1"):
        clip(trace, 1)


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.0, 3.7])
def test_scaling_multiplies_the_rate_over_the_same_time(factor: float) -> None:
    scaled = scale_rate(TRACE, factor, 1)
    assert len(scaled) == pytest.approx(factor * len(TRACE), rel=0.05)
    assert scaled[-1].at_s - scaled[0].at_s == pytest.approx(200, rel=0.03)
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(scaled))
    assert len({r.request_id for r in scaled}) == len(scaled)


def test_scaling_depends_on_its_seed_alone() -> None:
    assert scale_rate(TRACE, 1.5, 1) == scale_rate(TRACE, 1.5, 1)
    assert scale_rate(TRACE, 1.5, 1) != scale_rate(TRACE, 1.5, 2)


def test_scaling_by_one_changes_nothing() -> None:
    assert scale_rate(TRACE, 1.0, 1) == TRACE


def test_laying_copies_over_each_other_flattens_bursts() -> None:
    bursty = Gamma(rate_per_s=10, duration_s=500, cv=3).generate(LENGTHS, 0)
    before, after = statistics_of(bursty).gap_cv, statistics_of(scale_rate(bursty, 4, 1)).gap_cv
    assert before is not None and after is not None
    assert after < 0.85 * before


def test_copies_share_no_prefix_with_what_they_copy() -> None:
    trace = tuple(request(at_s, 12, 5, (0, 1, 2)) for at_s in range(20))
    groups = {r.prefix_ids for r in scale_rate(trace, 3, 1)}
    assert len(groups) == 3
    assert len(set(itertools.chain(*groups))) == 9


def test_repeating_a_window_replays_it_until_the_end() -> None:
    trace = tuple(request(at_s) for at_s in (0, 10, 12, 19, 25))
    repeated = repeat(trace, 10, 20, 45)
    assert [r.at_s for r in repeated] == [0, 10, 12, 19, 20, 22, 29, 30, 32, 39, 40, 42]
    assert len({r.request_id for r in repeated}) == len(repeated)


def test_other_lengths_keep_arrivals_and_drop_prefixes() -> None:
    trace = tuple(request(at_s, 12, 5, (0, 1, 2)) for at_s in range(5))
    changed = with_lengths(trace, SampledLengths(((100, 7),)), 1)
    assert [(r.request_id, r.at_s) for r in changed] == [(r.request_id, r.at_s) for r in trace]
    assert {(r.prompt_tokens, r.output_tokens, r.prefix_ids, r.prefix_block) for r in changed} == {(100, 7, (), 0)}


def test_a_factor_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="rate_scale must be a number above 0, got 0"):
        scale_rate(TRACE, 0, 1)
    with pytest.raises(ConfigError, match="leaves no request of 1"):
        scale_rate((request(0),), 1e-9, 1)
