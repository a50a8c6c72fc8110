"""The 99th percentile of TTFT: of long prompts, of those that wait by chance, and of those that come together."""

import pytest

from pengserve.planners.judge.fluid import predict
from tests.planners.judge.test_fluid import TP2, row

HORIZON_S = 20.0


def tail_s(**given: float) -> float:
    """Of an instance alone."""
    return float(predict(row(**given), HORIZON_S).tail_s[0])


def test_the_tail_is_that_of_long_prompts_where_nothing_is_in_the_way() -> None:
    usual, varied = tail_s(rate=0.01, spread=0.0), tail_s(rate=0.01, spread=1.0)
    assert varied > 3.0 * usual, "one prompt in a hundred is six times as long as the mean one"


def test_the_tail_grows_with_the_load_by_chance_and_not_with_a_queue_that_stands() -> None:
    calm, busy = tail_s(rate=0.1, spread=0.1), tail_s(rate=6.0, spread=0.1)
    assert busy > 1.5 * calm
    assert tail_s(rate=6.0, spread=0.1, waiting=400.0, waiting_tokens=400e3) < busy


def test_those_that_come_together_are_read_sooner_by_two_alone_than_by_both_as_one() -> None:
    """Both as one are sooner for a request that comes by itself."""

    def tails(mates: float) -> tuple[float, float]:
        alone = tail_s(rate=0.2, mates=mates / 2, routes=2.0)
        return alone, float(predict(row(TP2, rate=0.4, mates=mates), HORIZON_S).tail_s[0])

    alone_s, together_s = tails(0.0)
    assert together_s < alone_s
    alone_s, together_s = tails(8.0)
    assert alone_s < together_s


def test_a_tail_far_beyond_its_limit_counts_as_three_limits() -> None:
    """What is late counts as missed besides; else a queue's tail would outweigh the throughput that would end it."""
    costs = [
        float(predict(row(rate=0.01, spread=0.0, ttft_limit_s=limit_s, miss_s=100.0), HORIZON_S).cost_s[0])
        for limit_s in (1e-2, 1e-3)
    ]
    assert costs[0] == pytest.approx(costs[1], rel=0.02)
