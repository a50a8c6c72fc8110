"""The law of a noisy neighbour, in virtual time: a flood changes what others are served by 5 % at most, and their P99
TTFT by 1.2x at most.

Calm is the same workload without the flood: all others' requests are the same and come at the same times, and the
tenant that floods asks as often as they do. Both count the others' requests from 5 s after the flood has begun.
"""

import pytest

pytest.importorskip("vllm")

from benchmarks.fair.scoring import percentile
from benchmarks.fair.workload import Plan, make, tenant_name
from tests.support.shared_engine import Outcome, SharedEngine

DURATION_S, FLOOD_FROM, SETTLED_S = 120.0, 0.1, 5.0


def guests(seed: int, flood: float, engine: SharedEngine, sessions_per_s: float) -> tuple[list[float], int]:
    """TTFTs of all but the one that floods, and their tokens in that time."""
    plan = Plan(
        seed=seed,
        duration_s=DURATION_S,
        sessions_per_s=sessions_per_s,
        flood=flood,
        flood_from=FLOOD_FROM,
        flood_until=1.0,
        turns=2.0,
        output_tokens=80.0,
        max_tokens=900,
    )
    from_s = FLOOD_FROM * DURATION_S + SETTLED_S
    outcomes = engine.run(make(plan), until_s=DURATION_S + 30.0)
    found: list[Outcome] = [each for each in outcomes if each.turn.tenant != tenant_name(0)]
    tokens = sum(from_s <= at_s < DURATION_S for each in found for at_s in each.token_s)
    return [each.ttft_s for each in found if each.turn.at_s >= from_s], tokens


def ratios(sessions_per_s: float = 0.15, **engine: bool) -> tuple[float, float, float]:
    """Of P50 and P99 TTFT, and of tokens: with the flood to without it, over several seeds."""
    calm, busy = (
        [guests(seed, flood, SharedEngine(**engine), sessions_per_s) for seed in (1, 2, 3)]  # type: ignore[arg-type]
        for flood in (1.0, 20.0)
    )
    [calm_s, busy_s] = ([ttft for found, _ in part for ttft in found] for part in (calm, busy))
    [calm_tokens, busy_tokens] = (sum(tokens for _, tokens in part) for part in (calm, busy))
    p50, p99 = (percentile(busy_s, share) / percentile(calm_s, share) for share in (0.5, 0.99))
    return p50, p99, busy_tokens / calm_tokens


def test_a_flood_hurts_only_itself() -> None:
    p50, p99, served = ratios()
    assert p50 <= 1.2 and p99 <= 1.2
    assert served == pytest.approx(1.0, abs=0.05)


def test_a_flood_that_leaves_room_now_and_then_hurts_only_itself() -> None:
    """Places run out for a moment, and no lead tells the flood from its guests."""
    p50, p99, served = ratios(sessions_per_s=0.09)
    assert p50 <= 1.2 and p99 <= 1.2
    assert served == pytest.approx(1.0, abs=0.05)


def test_without_shares_it_hurts_all() -> None:
    """The measure tells the difference."""
    p50, p99, _ = ratios(is_fair=False, parks=False, has_chunks=False)
    assert p50 > 2 and p99 > 5


def test_without_parking_guests_wait_for_a_place() -> None:
    p50, _, served = ratios(parks=False)
    assert p50 > 1.2 and served == pytest.approx(1.0, abs=0.05)
