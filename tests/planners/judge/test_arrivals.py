"""How many requests will come: since when the rate of now holds, and how long it may go on."""

import numpy as np
import pytest

from pengserve.planners.judge.arrivals import FRESH_S, LASTS, Arrivals, mates_of

LOOK_S = 0.25


def coming(*phases: tuple[float, float], seed: int | None = None) -> Arrivals:
    """After phases of (seconds, requests a second), evenly or as a Poisson process."""
    times = np.arange(0.0, sum(seconds for seconds, _ in phases) + 1e-9, LOOK_S)
    rates = np.concatenate([np.full(round(seconds / LOOK_S), rate) for seconds, rate in phases])
    counts = rates * LOOK_S if seed is None else np.random.default_rng(seed).poisson(rates * LOOK_S)
    return Arrivals.of(times, np.concatenate([[0.0], np.cumsum(counts)]))


def test_a_burst_is_as_old_as_it_was_seen_and_may_last_twice_as_long() -> None:
    found = coming((25.0, 30.0), (15.0, 66.0)).expected
    assert found.now == pytest.approx(66.0, rel=0.05) and found.later == pytest.approx(43.5, rel=0.05)
    assert found.lasts_s == pytest.approx(LASTS * 15.0, rel=0.4)


def test_a_burst_of_the_newest_second_counts_at_once() -> None:
    found = coming((39.0, 3.0), (1.0, 40.0)).expected
    assert found.now == pytest.approx(40.0, rel=0.25) and found.lasts_s <= LASTS * (FRESH_S + 2 * LOOK_S)


@pytest.mark.parametrize("seed", range(5))
def test_the_rate_of_steady_traffic_is_known_to_within_its_chance(seed: int) -> None:
    found = coming((40.0, 20.0), seed=seed)
    assert found.expected.now == pytest.approx(20.0, rel=0.15)
    assert found.few.now < found.expected.now < found.many.now <= found.most.now < 1.3 * 20.0


def test_few_requests_are_a_burst_that_ends_soon_or_a_lull_that_lasts() -> None:
    burst, lull = coming((30.0, 10.0), (10.0, 40.0)), coming((30.0, 40.0), (10.0, 10.0))
    assert burst.few.lasts_s < burst.expected.lasts_s < burst.many.lasts_s
    assert lull.many.lasts_s < lull.expected.lasts_s < lull.few.lasts_s


def test_what_came_at_once_before_may_come_at_once_again() -> None:
    uneven = coming(*[(5.0, 2.0), (5.0, 30.0)] * 4)
    assert uneven.most.now > 1.5 * coming((40.0, 16.0)).most.now
    assert uneven.most.now == uneven.most.later


def test_nothing_came() -> None:
    found = coming((10.0, 0.0))
    assert found.expected.now == found.expected.later == found.few.now == 0.0 < found.many.now


@pytest.mark.parametrize("step_s", [0.1, 0.5])
def test_requests_that_come_together_have_mates_and_those_that_come_by_chance_have_none(step_s: float) -> None:
    """Looks may come at any times; a rate that grows is no sign of mates."""
    generator = np.random.default_rng(1)
    times = np.cumsum(generator.uniform(0.2 * step_s, 1.8 * step_s, int(40 / step_s)))
    rates = 0.2 * times  # requests by second
    by_chance = np.cumsum(generator.poisson(rates * np.diff(times, prepend=0.0)))
    together = np.cumsum(8.0 * (np.diff(np.floor(times), prepend=0.0) > 0))
    assert mates_of(times, together) == pytest.approx(7.0 - 8.0 * step_s, abs=1.0)
    assert mates_of(times, by_chance.astype(np.float64)) < 0.7
    assert mates_of(times, np.zeros_like(times)) == 0.0
