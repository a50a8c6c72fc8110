"""Upscaling: more requests, over the same time, as bursty as before and where the bursts were."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.generators.burstgpt import BURSTGPT_LENGTHS, BURSTGPT_STAY, BurstGpt
from pengserve.simulator.traces.generators.conversations import MultiTurn
from pengserve.simulator.traces.generators.lengths import UniformLengths
from pengserve.simulator.traces.generators.steady import Gamma
from pengserve.simulator.traces.kv_demand import demand_of
from pengserve.simulator.traces.upscale import scale_to_kv, upscale
from tests.support.effort import examples
from tests.support.trace_statistics import statistics_of

LENGTHS = UniformLengths(prompt=(5, 50), output=(1, 20))
BURSTY = BurstGpt(rate_per_s=6, cv=1.5).generate(BURSTGPT_LENGTHS, 0)


def counts(trace: tuple[Arrival, ...], window_s: float) -> np.ndarray:
    return np.histogram([r.at_s for r in trace], np.arange(0, 640 + window_s, window_s))[0]


@pytest.mark.parametrize("factor", [0.25, 0.6, 1.0, 1.5, 3.0, 7.3])
def test_the_rate_is_multiplied_over_the_same_time(factor: float) -> None:
    scaled = upscale(BURSTY, factor, 1)
    assert len(scaled) - 1 == round(factor * (len(BURSTY) - 1))
    assert (scaled[0].at_s, scaled[-1].at_s) == (BURSTY[0].at_s, BURSTY[-1].at_s)


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("factor", [0.5, 2.0, 3.5])
def test_the_burstiness_of_gaps_stays(cv: float, factor: float) -> None:
    trace = Gamma(rate_per_s=10, duration_s=600, cv=cv).generate(LENGTHS, 0)
    before, after = statistics_of(trace).gap_cv, statistics_of(upscale(trace, factor, 1)).gap_cv
    assert after == pytest.approx(before, rel=1e-3 if factor == 2.0 else 0.12)


@pytest.mark.parametrize("factor", [0.5, 3.0, 4.5])
def test_the_temporal_pattern_stays(factor: float) -> None:
    before, after = counts(BURSTY, 20), counts(upscale(BURSTY, factor, 1), 20)
    assert np.corrcoef(before, after)[0, 1] > 0.97
    assert after.max() / after.mean() == pytest.approx(before.max() / before.mean(), rel=0.1)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_whole_factor_copies_every_request_so_often(factor: float) -> None:
    scaled = Counter((r.prompt_tokens, r.output_tokens) for r in upscale(BURSTY, factor, 1))
    once = Counter((r.prompt_tokens, r.output_tokens) for r in BURSTY[:-1])
    once = Counter({lengths: int(factor) * count for lengths, count in once.items()})
    once[(BURSTY[-1].prompt_tokens, BURSTY[-1].output_tokens)] += 1
    assert scaled == once


@settings(max_examples=examples(60))
@given(st.lists(st.floats(0, 100), min_size=2, max_size=200), st.floats(0.3, 5), st.integers(0, 9))
def test_any_trace_stays_in_order_with_names_that_differ(times: list[float], factor: float, seed: int) -> None:
    trace = tuple(
        Arrival(request_id=f"r{i}", at_s=round(at_s, 6), prompt_tokens=1, output_tokens=1)
        for i, at_s in enumerate(sorted(times))
    )
    if round(factor * (len(trace) - 1)) < 1:
        return
    scaled = upscale(upscale(trace, factor, seed), 2.0, seed)
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(scaled))
    assert len({r.request_id for r in scaled}) == len(scaled)


def test_upscaling_depends_on_its_seed_alone() -> None:
    assert upscale(BURSTY, 2.5, 1) == upscale(BURSTY, 2.5, 1)
    assert upscale(BURSTY, 2.5, 1) != upscale(BURSTY, 2.5, 2)


def test_turns_of_copied_conversations_stay_in_order_and_apart() -> None:
    kind = MultiTurn(conversations_per_s=1, duration_s=60, mean_pause_s=1, prefix_block=4)
    trace = kind.generate(LENGTHS, 0)
    last_ids: dict[int, tuple[int, ...]] = {}  # by the first block of a conversation, which no other one has
    for turn in upscale(trace, 3.0, 1):
        if turn.prefix_ids:
            before = last_ids.get(turn.prefix_ids[0], ())
            assert turn.prefix_ids[: len(before)] == before
            last_ids[turn.prefix_ids[0]] = turn.prefix_ids
    originals = {turn.prefix_ids[0] for turn in trace if turn.prefix_ids}
    assert len(last_ids) == pytest.approx(3 * len(originals), abs=2)


@pytest.mark.parametrize("wanted", [13_000, 40_000, 300_000])
def test_the_mean_demand_for_kv_becomes_what_is_wanted(wanted: float) -> None:
    scaled = scale_to_kv(BURSTY, wanted, BURSTGPT_STAY, 1)
    assert demand_of(scaled, BURSTGPT_STAY).mean_tokens == pytest.approx(wanted, rel=0.02)


def test_a_factor_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="upscale must be a number above 0, got -1"):
        upscale(BURSTY, -1, 1)
    with pytest.raises(ConfigError, match="leaves no gap of 0"):
        upscale(BURSTY[:1], 2, 1)
