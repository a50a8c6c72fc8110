"""Laws of the fast scheduler that need no vLLM beside it. That it decides as vLLM: `test_equal_decisions.py`."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from pengserve.planners.short_prompts import SHORT
from pengserve.planners.types.errors import ConfigError, PlanError
from pengserve.simulator.engine.fast_scheduler import FastScheduler
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.scheduler import SimStep
from pengserve.simulator.requests import LiveRequest
from tests.simulator.engine.loads import GIVING_WAY, MODEL, Load, capacity, live, loads
from tests.support.effort import examples

MANY = settings(max_examples=examples(150))
TICK_S = 0.004


def held(scheduler: FastScheduler) -> int:
    """Blocks that running requests must have at least: those of their computed tokens."""
    size = scheduler.capacity.block_size
    return sum(-(-scheduler.computed_tokens(request) // size) for request in scheduler.running)


def check_blocks(scheduler: FastScheduler) -> None:
    entries = scheduler._state.entries.values()
    assert scheduler.num_free >= 0
    assert scheduler.num_free + sum(entry.blocks for entry in entries) == scheduler.num_blocks
    assert all(entry.computed <= entry.room for entry in entries if entry.blocks)
    assert held(scheduler) <= scheduler.num_blocks - scheduler.num_free


def ends(load: Load, most: int, tick_s: float = 0.0) -> dict[str, Any]:
    """When each request ended, in steps, and how often it was preempted; at most `most` steps at once, of `tick_s`."""
    requests, events = load.lives(), deque(load.events)
    tick, ended = 0, dict[str, Any]()
    scheduler = FastScheduler(load.capacity, load.options, lambda: tick_s * tick)
    while events or scheduler.running or scheduler.waiting:
        while events and events[0][0] <= tick:
            request = requests[events.popleft()[2]]
            request.came_s = tick_s * tick
            scheduler.add(request)
        step = scheduler.schedule(min(most, events[0][0] - tick) if events else most)
        if step is None:
            tick = events[0][0]
            continue
        tick += step.max_steps
        for request in scheduler.finish(step, step.max_steps):
            ended[request.request_id] = (tick, request.num_generated, request.num_preemptions)
        check_blocks(scheduler)
    return ended | {"totals": scheduler.totals, "free": scheduler.num_free}


@MANY
@given(loads())
def test_many_steps_at_once_are_what_they_are_one_by_one(load: Load) -> None:
    assert ends(load, 1 << 30) == ends(load, 1)


@MANY
@given(loads(hurries=True, late_prompts=False, long_answers=GIVING_WAY))  # an order by time is renewed between runs
def test_so_are_they_where_long_answers_give_way(load: Load) -> None:
    assert ends(load, 1 << 30, TICK_S) == ends(load, 1, TICK_S)


@MANY
@given(loads(max_stages=3, kinds=("add", "decoding")))
def test_blocks_are_free_or_held_after_every_call(load: Load) -> None:
    scheduler, requests, events = FastScheduler(load.capacity, load.options), load.lives(), deque(load.events)
    flights = deque[SimStep]()
    while events or flights or scheduler.running or scheduler.waiting:
        if events and not flights:
            _, what, index = events.popleft()
            request = requests[index]
            if what == "remove":
                scheduler.remove([request])
            elif what == "decoding" and request.num_tokens > 1:
                scheduler.admit(request, request.num_tokens - 1)
            else:
                scheduler.add(request)
            check_blocks(scheduler)
        while len(flights) < load.options.num_stages and (step := scheduler.schedule()):
            flights.append(step)
            check_blocks(scheduler)
        if flights:
            scheduler.finish(flights.popleft())
            check_blocks(scheduler)
    assert scheduler.num_free == scheduler.num_blocks


@MANY
@given(loads(preemption="swap", watermark=0.0))
def test_with_swapping_no_token_is_computed_twice(load: Load) -> None:
    scheduler, requests, computed = FastScheduler(load.capacity, load.options), load.lives(), 0
    for request in requests:
        scheduler.add(request)
    out_bytes = in_bytes = 0
    while step := scheduler.schedule():
        computed += step.batch.num_decodes + sum(chunk.num_tokens for chunk in step.batch.prefills)
        out_bytes, in_bytes = out_bytes + step.swap_out_bytes, in_bytes + step.swap_in_bytes
        scheduler.finish(step)
    assert computed == sum(r.arrival.prompt_tokens + r.arrival.output_tokens - 1 for r in requests)
    assert out_bytes == in_bytes
    assert (out_bytes > 0) == any(request.num_preemptions for request in requests)


def test_what_does_not_fit_the_host_is_computed_again() -> None:
    options = SchedulerOptions(preemption="swap", host_blocks=0)
    scheduler = FastScheduler(capacity(num_blocks=6), options)
    for name in ("a", "b"):
        scheduler.add(live(name, 8, 12))
    preempted: list[LiveRequest] = []
    while step := scheduler.schedule():
        preempted += step.preempted
        assert step.swap_out_bytes == step.swap_in_bytes == 0
        scheduler.finish(step)
    assert preempted


def test_a_request_with_tokens_goes_before_those_without() -> None:
    scheduler = FastScheduler(capacity())
    first, moved = live("first", 4, 4), live("moved", 4, 4)
    moved.num_generated = 2
    scheduler.add(first)
    scheduler.add(moved)
    assert scheduler.waiting == [moved, first]
    assert scheduler.queued_tokens == 4 + 6
    assert scheduler.totals["total_resumed"] == 1


def test_admit_takes_blocks_for_one_token_more_or_changes_nothing() -> None:
    scheduler = FastScheduler(capacity(num_blocks=4, block_size=4))
    request = live("a", 8, 4)
    request.num_generated = 1
    assert scheduler.admit(request, 8)
    assert (scheduler.num_free, scheduler.computed_tokens(request)) == (1, 8)
    other = live("b", 7, 4)
    other.num_generated = 1
    assert not scheduler.admit(other, 7)
    assert (scheduler.num_free, list(scheduler.running)) == (1, [request])


def test_a_pool_shrinks_to_what_is_in_use_and_grows_again() -> None:
    scheduler = FastScheduler(capacity(num_blocks=10, block_size=4))
    scheduler.add(live("a", 8, 8))
    step = scheduler.schedule()
    assert step is not None
    scheduler.finish(step)
    assert not scheduler.resize(1)
    assert scheduler.num_blocks == 10
    assert scheduler.resize(2)
    assert scheduler.num_free == 0
    assert scheduler.resize(20)
    assert scheduler.num_free == 18


def test_a_removed_request_gives_its_blocks_back_and_comes_no_more() -> None:
    scheduler = FastScheduler(capacity())
    a, b = live("a", 8, 8), live("b", 8, 8)
    scheduler.add(a)
    step = scheduler.schedule()
    assert step is not None
    scheduler.finish(step)
    scheduler.add(b)
    scheduler.remove([a, b, live("never seen", 1, 1)])
    assert scheduler.num_free == scheduler.num_blocks
    assert scheduler.schedule() is None


def test_requests_whose_kv_fills_the_pool_do_not_wait_for_each_other_for_ever() -> None:
    scheduler = FastScheduler(capacity(num_blocks=6, block_size=4))
    requests = [live(name, 12, 8) for name in ("a", "b")]
    for request in requests:
        assert scheduler.admit(request, 5)
    assert scheduler.resize(4)
    while step := scheduler.schedule():
        scheduler.finish(step)
    assert not scheduler.running  # without a block they had both stayed there
    assert requests[0].num_preemptions > 0


def test_a_run_ends_where_the_pool_does() -> None:
    scheduler = FastScheduler(capacity(num_blocks=5, block_size=4))
    scheduler.add(live("a", 4, 12))
    scheduler.add(live("b", 4, 12))
    step = scheduler.schedule()
    assert step is not None
    scheduler.finish(step)
    run = scheduler.schedule(100)
    assert run is not None
    assert run.max_steps == 4  # each has a block more, one is left and neither can have it before both need it
    scheduler.finish(run, 4)
    after = scheduler.schedule(100)
    assert after is not None
    assert [request.request_id for request in after.preempted] == ["b"]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (live("long", 300, 101), "request long gets 401 tokens long, and the lane holds 400"),
        (live("done", 3, 0), "request done has all its tokens"),
    ],
)
def test_what_cannot_be_served_is_refused(request_: LiveRequest, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        FastScheduler(capacity()).add(request_)


@pytest.mark.parametrize("computed", [0, 5])
def test_a_request_cannot_come_with_no_kv_or_all_of_it(computed: int) -> None:
    with pytest.raises(PlanError, match="request a of 5 tokens cannot come with the KV of"):
        FastScheduler(capacity()).admit(live("a", 5, 1), computed)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_num_batched_tokens": 0},
        {"watermark": 1.0},
        {"policy": "fair"},
        {"preemption": "never"},
        {"num_stages": 0},
        {"max_in_flight": 3, "num_stages": 2},
        {"max_in_flight": -1},
    ],
)
def test_options_name_the_field_that_is_wrong(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SchedulerOptions(**wrong)


def microbatches_of_a_queue(*, short_prompts: bool) -> int:
    """How many two stages need for 24 prompts of three steps each, while a short one comes with every eighth."""
    model = replace(MODEL, prefix_attention_s=1e-7, load_s=1e-3)  # the beginning of a prompt costs least
    options = SchedulerOptions(max_num_batched_tokens=512, num_stages=2, lookahead=model, short_prompts=short_prompts)
    scheduler, flights, count = FastScheduler(capacity(4000, 16, 64), options), deque[SimStep](), 0
    for index in range(24):
        scheduler.add(live(f"long {index}", 3 * 512, 4))
    while scheduler.running or scheduler.waiting or flights:
        if count % 8 == 0 and count < 400:
            scheduler.add(live(f"short {count}", 512 // SHORT, 4))
        while len(flights) < 2 and (step := scheduler.schedule()) is not None:
            flights.append(step)
        scheduler.finish(flights.popleft())
        count += 1
    return count


def test_short_prompts_that_overtake_make_no_microbatch_the_measure_of_smaller_ones() -> None:
    """They cost less than what they overtake; microbatches grow by a hundredth or two from one to the next."""
    in_order = microbatches_of_a_queue(short_prompts=False)
    assert microbatches_of_a_queue(short_prompts=True) <= 1.03 * in_order
