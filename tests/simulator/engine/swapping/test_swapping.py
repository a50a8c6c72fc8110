"""Laws of context switches: all requests end under any churn, and each of FastSwitch's parts does what it is for."""

import random

import pytest

from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.swapping.costs import Link, SwapCosts, SwapOptions
from pengserve.simulator.engine.swapping.priorities import Priorities
from pengserve.simulator.engine.swapping.scheduler import SwapScheduler
from pengserve.simulator.policies.policy import Facts
from pengserve.simulator.policies.swapping import FastSwitch, VllmPriority
from pengserve.simulator.requests import Arrival, LiveRequest

CAPACITY = KvCapacity(
    num_blocks=60, block_size=16, bytes_per_block=2_000_000, max_model_len=900, max_num_seqs=16, weight_bytes=0
)
COSTS = SwapCosts(num_layers=32, block_bytes=2_000_000, bytes_per_s=25e9)
VLLM = SwapOptions(every=5)
GROUPS = SwapOptions(every=5, groups=True)
ASYNC = SwapOptions(every=5, groups=True, is_async=True)
FAST = SwapOptions(every=5, groups=True, is_async=True, reuse=True)
RECOMPUTE = SwapOptions(every=5, is_recompute=True)


def conversations(seed: int, count: int = 12) -> list[LiveRequest]:
    """Two turns of each; the second begins with the first and its answer."""
    rng, found = random.Random(seed), []
    for index in range(count):
        prompt, output = rng.randint(40, 200), rng.randint(10, 80)
        for turn, tokens in enumerate((prompt, prompt + output + 30)):
            arrival = Arrival(
                request_id=f"c{index}.{turn}", at_s=index + 100.0 * turn, prompt_tokens=tokens, output_tokens=output
            )
            found.append(LiveRequest(arrival))
    return sorted(found, key=lambda live: live.arrival.at_s)


def run(swap: SwapOptions, seed: int = 1, host_blocks: int = 10_000) -> tuple[SwapScheduler, list[LiveRequest], float]:
    """All first turns at once, then all second ones; the scheduler, the requests, and when the last one ended."""
    now = [0.0]
    scheduler = SwapScheduler(CAPACITY, SchedulerOptions(), COSTS, swap, host_blocks, lambda: now[0])
    lives = conversations(seed)
    for turn in (0, 1):
        for live in lives:
            if live.request_id.endswith(f".{turn}"):
                scheduler.add(live)
        while (step := scheduler.schedule()) is not None:
            held = sum(scheduler._blocks(t.live.num_tokens) for t in scheduler._turns.values() if t.is_here)
            assert held <= CAPACITY.num_blocks + len(scheduler._turns), "more than the device holds"
            now[0] += step.wait_s + 0.03 + 1e-4 * sum(chunk.num_tokens for chunk in step.batch.prefills)
            scheduler.finish(step)
            assert now[0] < 1000
    return scheduler, lives, now[0]


@pytest.mark.parametrize("swap", [VLLM, GROUPS, ASYNC, FAST, RECOMPUTE], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_under_churn(swap: SwapOptions, seed: int) -> None:
    scheduler, lives, _ = run(swap, seed)
    assert all(live.is_done for live in lives)
    assert not scheduler.running
    assert scheduler.counts.switches > 0, "nothing was ever preempted"


def test_groups_call_less_and_asynchronous_copies_are_waited_for_less() -> None:
    found = {swap: run(swap)[0].counts for swap in (VLLM, GROUPS, ASYNC)}
    assert found[GROUPS].calls < found[VLLM].calls
    assert found[GROUPS].waited_s < found[VLLM].waited_s
    assert found[ASYNC].waited_s < found[GROUPS].waited_s


def test_reuse_copies_only_what_is_new() -> None:
    assert run(FAST)[0].counts.out_blocks < 0.7 * run(ASYNC)[0].counts.out_blocks


def test_a_second_turn_finds_what_the_host_kept() -> None:
    _, lives, _ = run(FAST)
    seconds = [live for live in lives if live.request_id.endswith(".1")]
    assert all(live.cached_tokens > 0 for live in seconds)
    _, lives, _ = run(FAST, host_blocks=3)
    assert not any(live.cached_tokens for live in lives)


def test_recompute_is_slower_than_fastswitch() -> None:
    assert run(FAST)[2] < run(RECOMPUTE)[2]


def test_a_link_goes_both_ways_and_queues_each() -> None:
    link = Link(COSTS)
    first = link.send(20, 0.0, to_host=True, groups=True)
    assert first == pytest.approx(20 * 2_000_000 / 25e9)
    assert link.send(20, 0.0, to_host=True, groups=True) == pytest.approx(2 * first)
    assert link.send(20, 0.0, to_host=False, groups=True) == pytest.approx(first)
    assert COSTS.calls(20, groups=False) == 306
    assert COSTS.calls(20, groups=True) == 64
    assert COSTS.seconds(20, groups=False) == pytest.approx(306 * 10e-6)


def test_markov_priorities_favour_who_was_served() -> None:
    names = [f"c{i}" for i in range(200)]
    found = Priorities("markov", 0)
    found.update(names, names[:100])
    served, others = ([found.of(name) for name in part] for part in (names[:100], names[100:]))
    assert sum(served) < 0.8 * sum(others)
    again = Priorities("markov", 0)
    again.update(names, names[:100])
    assert [again.of(name) for name in names] == served + others


def test_swapping_needs_a_host() -> None:
    facts = Facts(num_instances=1, per_node=8, degrees=(), max_stages=1)
    for policy in (FastSwitch(), VllmPriority()):
        with pytest.raises(ConfigError, match="host_bytes"):
            policy.setup(facts)
