"""Laws of requests whose priorities change all the time, in virtual time: the most urgent one begins with the next step
or after a turn of `QUANTUM_TOKENS`, nothing is lost for it, and no request starves.

The load is about 1.2 times what two places can serve. vLLM's scheduler by priority is told all changes here, for which
its server has no call.
"""

import itertools

import pytest

pytest.importorskip("vllm")

from benchmarks.fair.scoring import percentile
from benchmarks.fair.workload import Plan, make
from pengserve.planners.preemption import AGE_S, QUANTUM_TOKENS
from tests.support.shared_engine import STEP_S, TOKEN_S, Outcome, SharedEngine

LONGEST_STEP_S = STEP_S + TOKEN_S * 512
BEHIND_S = (
    QUANTUM_TOKENS * STEP_S + LONGEST_STEP_S
)  # where all that run came back a moment ago, and a step is under way
LEVELS, TENANTS = 4, 4
SEEDS = (1, 2)


def churn(seed: int, tenants: int = TENANTS) -> Plan:
    return Plan(
        seed=seed,
        duration_s=14.0,
        num_tenants=tenants,
        sessions_per_s=6.4 / tenants,
        flood=1.0,
        turns=2.0,
        output_tokens=80.0,
        max_tokens=900,
        pattern="random",
        update_s=0.5,
        levels=LEVELS,
    )


def by_priority() -> SharedEngine:
    """vLLM's own."""
    return SharedEngine(is_fair=False, by_priority=True, parks=False, has_chunks=False)


def parking() -> SharedEngine:
    """The same without tenants, and requests give way to more urgent ones."""
    return SharedEngine(is_fair=False, by_priority=True)


def tokens_per_s(outcomes: list[Outcome]) -> float:
    return sum(len(each.token_s) for each in outcomes) / max(each.token_s[-1] for each in outcomes)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_most_urgent_request_begins_at_once_and_nothing_is_lost_for_it(seed: int) -> None:
    work = make(churn(seed))
    plain, ours, shared = (engine.run(work) for engine in (by_priority(), parking(), SharedEngine()))
    for outcomes in (ours, shared):
        assert max(each.longest_behind_s for each in outcomes) <= BEHIND_S
        assert tokens_per_s(outcomes) >= 0.98 * tokens_per_s(plain)
    assert max(each.longest_behind_s for each in plain) > 3 * BEHIND_S, "the measure tells the difference"
    assert percentile([each.ttft_s for each in ours], 0.5) < 0.9 * percentile([each.ttft_s for each in plain], 0.5)


def test_no_request_is_left_alone_for_long_and_none_goes_to_and_fro() -> None:
    engine, work = parking(), make(churn(3))
    outcomes = engine.run(work)
    gaps = [later - earlier for each in outcomes for earlier, later in itertools.pairwise(each.token_s)]
    most_parked = max(engine.num_parked)
    assert max(gaps) <= (LEVELS - 1 + 1) * AGE_S + most_parked * BEHIND_S, "each of them has its turn"
    assert engine.residency is not None
    displaced = engine.residency.tiers.tiers.counts.displaced
    assert 20 < displaced <= len(work.turns) + len(work.updates), "each for a request that came, or a change"
