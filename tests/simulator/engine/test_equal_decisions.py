"""The fast scheduler decides as vLLM's own does: the same requests, tokens, blocks and victims in every step."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")
from pengserve.simulator.engine.fast_scheduler import FastScheduler
from pengserve.simulator.engine.scheduler import KeepsStepsShort, LaneScheduler, SimStep
from pengserve.simulator.engine.vllm_scheduler import VllmScheduler
from pengserve.simulator.requests import LiveRequest
from tests.simulator.engine.loads import GIVING_WAY, MODEL, Load, loads
from tests.support.effort import examples

pytestmark = pytest.mark.slow

Maker = Callable[..., LaneScheduler]
MANY = settings(max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow])


class Clock:
    """Seconds, as the test says."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ids(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def state(scheduler: LaneScheduler) -> dict[str, Any]:
    running = scheduler.running
    return {
        "running": [(r.request_id, scheduler.computed_tokens(r), r.num_generated) for r in running],
        "waiting": ids(scheduler.waiting),
        "queued": scheduler.queued_tokens,
        "free": scheduler.num_free,
        "freed": scheduler.blocks_freed(running),
        "blocks": scheduler.num_blocks,
    }


def facts(step: SimStep | None) -> Any:
    if step is None:
        return None
    return {
        "batch": step.batch,
        "requests": ids(step.requests),
        "due": ids(step.due),
        "admitted": sorted(ids(step.admitted)),
        "preempted": sorted(ids(step.preempted)),
    }


def do(scheduler: LaneScheduler, what: str, request: LiveRequest) -> Any:
    if what == "remove":
        scheduler.remove([request])
        return None
    if what in ("meet", "go on"):
        assert isinstance(scheduler, KeepsStepsShort)
        return scheduler.keep_steps_short(what == "meet")
    if what == "resize":
        return scheduler.resize(request.arrival.prompt_tokens + request.arrival.output_tokens)
    if what in ("resumed", "decoding") and request.arrival.output_tokens > 1:  # it comes from elsewhere
        request.num_generated = 1
    if what in ("decoding", "prefilling") and request.num_tokens > 1:
        return scheduler.admit(request, request.num_tokens - 1)
    return scheduler.add(request)


def record(make: Maker, load: Load) -> list[Any]:
    """All that can be seen of a run, step by step."""
    clock = Clock()
    scheduler = make(load.capacity, load.options, clock)
    requests, seen = load.lives(), list[Any]()
    events, flights = deque(load.events), deque[SimStep]()
    for tick in range(4000):
        clock.now_s = 0.012 * tick  # orders of late prompts are renewed in every second step
        while events and events[0][0] <= tick:
            _, what, index = events.popleft()
            requests[index].came_s = requests[index].came_s or clock.now_s - 0.01 * index
            seen.append(do(scheduler, what, requests[index]))
        while len(flights) < load.options.num_stages:
            step = scheduler.schedule()
            seen.append((facts(step), state(scheduler)))
            if step is None:
                break
            flights.append(step)
        if flights:
            step = flights.popleft()
            seen.append((ids(scheduler.finish(step)), state(scheduler)))
        elif not events:
            break
    seen.append((scheduler.totals, [(r.num_generated, r.num_preemptions) for r in requests]))
    return seen


def agree(load: Load, one: Maker = FastScheduler, other: Maker = VllmScheduler) -> None:
    ours, theirs = record(one, load), record(other, load)
    for number, (our, their) in enumerate(zip(ours, theirs, strict=False)):
        assert our == their, f"record {number}"
    assert len(ours) == len(theirs)


@MANY
@given(loads(max_stages=4), st.booleans())
def test_vllm_decides_the_same_whatever_it_tells_its_runner(load: Load, prefix_caching: bool) -> None:
    load = replace(load, options=replace(load.options, prefix_caching=prefix_caching))
    agree(load, VllmScheduler, partial(VllmScheduler, is_terse=False))


@MANY
@given(loads())
def test_arrivals_prompts_in_chunks_and_preemption(load: Load) -> None:
    agree(load)


@MANY
@given(loads(max_stages=4))
def test_several_unfinished_steps(load: Load) -> None:
    agree(load)


@MANY
@given(loads(min_stages=2, max_stages=4, lookahead=MODEL))
def test_microbatches_of_the_lookahead(load: Load) -> None:
    agree(load)


@MANY
@given(loads(max_stages=4, kinds=("add", "add", "add", "resumed"), hurries=True, long_answers=GIVING_WAY))
def test_long_answers_that_give_way(load: Load) -> None:
    agree(load)


@MANY
@given(loads(max_stages=4, kinds=("add", "add", "decoding", "prefilling"), meets=True))
def test_steps_that_members_of_a_switch_wait_for(load: Load) -> None:
    agree(load)


@MANY
@given(loads(kinds=("add", "add", "resumed", "decoding", "prefilling", "resize")))
def test_requests_that_come_with_their_kv_or_go_and_pools_that_change(load: Load) -> None:
    agree(load)
