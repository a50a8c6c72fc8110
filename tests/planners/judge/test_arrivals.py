"""How many requests will come: since when the rate of now holds, and how long it may go on."""

import numpy as np
import pytest

from pengserve.planners.judge.arrivals import FRESH_S, Arrivals, mates_of, phase_of
from pengserve.planners.judge.bursts import APART_S, LASTS, Bursts, Phase

LOOK_S = 0.25


def coming(*phases: tuple[float, float], seed: int | None = None) -> Arrivals:
    """After phases of (seconds, requests a second), evenly or as a Poisson process."""
    times = np.arange(0.0, sum(seconds for seconds, _ in phases) + 1e-9, LOOK_S)
    rates = np.concatenate([np.full(round(seconds / LOOK_S), rate) for seconds, rate in phases])
    counts = rates * LOOK_S if seed is None else np.random.default_rng(seed).poisson(rates * LOOK_S)
    came = np.concatenate([[0.0], np.cumsum(counts)])
    return Arrivals.of(times, came, phase_of(times, came), Bursts())


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


def bursts(*lengths_s: float, apart_s: float = 60.0) -> Bursts:
    """What is remembered after bursts of 8 requests a second, each followed by a calm time with 1 a second."""
    found, now_s = Bursts(), 0.0
    for length_s in lengths_s:
        for seconds in np.arange(LOOK_S, length_s + 1e-9, LOOK_S):
            phase = Phase(requests=8.0 * seconds, seconds=seconds, before=1.0)
            found = found.seen(phase, now_s + seconds)
        now_s += length_s + apart_s
        found = found.seen(Phase(requests=40.0, seconds=40.0, before=None), now_s)
    return found


def now(held_s: float) -> Phase:
    return Phase(requests=8.0 * held_s, seconds=held_s, before=1.0)


def test_the_next_burst_is_expected_to_last_as_those_did_that_ended() -> None:
    assert bursts().lasts_s(now(3.0), FRESH_S) == LASTS * 3.0
    seen = bursts(5.0)
    assert seen.count == 1.0 and seen.seconds == pytest.approx(5.0, abs=LOOK_S)
    assert bursts(*[5.0] * 20).lasts_s(now(1.0), FRESH_S) == pytest.approx(5.0, rel=0.15)
    assert bursts(5.0, 5.0, 5.0).lasts_s(now(30.0), FRESH_S) > 2.0 * bursts(5.0, 5.0, 5.0).lasts_s(now(1.0), FRESH_S)


def test_old_bursts_count_less_and_near_ones_are_one() -> None:
    changed = bursts(*[2.0] * 20, *[20.0] * 20)
    assert changed.lasts_s(now(1.0), FRESH_S) == pytest.approx(20.0, rel=0.2)
    near = bursts(4.0, 4.0, apart_s=APART_S - 1.0).seen(now(1.0), 1000.0)
    assert near.count == 1.0 and near.seconds == pytest.approx(4.0 + APART_S - 1.0 + 4.0, abs=2 * LOOK_S)


def test_a_rate_that_is_a_little_higher_is_no_burst() -> None:
    little = Phase(requests=12.0, seconds=10.0, before=1.0)
    assert bursts(5.0, 5.0).seen(little, 1000.0) == bursts(5.0, 5.0)
    assert bursts(5.0, 5.0).lasts_s(little, FRESH_S) == LASTS * 10.0


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
