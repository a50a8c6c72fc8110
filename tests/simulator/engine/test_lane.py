"""Laws of a lane: its tokens come when its steps end, whatever interrupts it, and runs are only fewer events."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pengserve.planners.cost_model import Chunk
from pengserve.simulator.clock import run_virtual
from pengserve.simulator.engine.fast_scheduler import FastScheduler
from pengserve.simulator.engine.lane import SimLane
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.pipeline_lane import PipelineLane
from pengserve.simulator.engine.scheduler import SimStep
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import Batch
from tests.simulator.engine.loads import MODEL, LinearTimes, capacity, live

ROOM = capacity(num_blocks=200, block_size=16, max_num_seqs=32)
TIMES = LinearTimes()


class OneByOne(FastScheduler):
    """The fast scheduler, but a step at a time."""

    def schedule(self, max_steps: int = 1) -> SimStep | None:
        return super().schedule(1)


def lane_of(scheduler: FastScheduler, ended: list[LiveRequest], **options: Any) -> SimLane:
    if scheduler.options.num_stages > 1:
        return PipelineLane(scheduler, TIMES, on_end=ended.extend, transfer_s=lambda batch: 1e-4, **options)
    return SimLane(scheduler, TIMES, on_end=ended.extend, **options)


def facts(requests: Sequence[LiveRequest]) -> list[Any]:
    names = (
        "num_generated", "scheduled_s", "first_token_s", "last_token_s", "longest_gap_s", "num_preemptions", "stalls_s"
    )  # fmt: skip
    return [[getattr(request, name) for name in names] for request in requests]


def serve(
    make: Callable[..., FastScheduler] = FastScheduler, count: int = 150, rate: float = 12.0, poll_s: float = 0.5,
    **options: Any,
) -> tuple[list[Any], Any, dict[str, int]]:  # fmt: skip
    """A whole run: requests arrive, some are aborted, the lane is paused and stalled, and looked at all the time."""

    async def main() -> tuple[list[Any], Any, dict[str, int]]:
        loop, rng, ended, gone = asyncio.get_running_loop(), random.Random(7), list[LiveRequest](), list[LiveRequest]()
        lane = lane_of(make(ROOM, SchedulerOptions(**options)), ended)
        requests = []

        async def disturb() -> None:
            for pause_s in (0.3, 2.0, 1.1):
                await asyncio.sleep(pause_s)
                await lane.pause()
                assert lane.is_idle
                await asyncio.sleep(0.2)
                lane.stall(0.3)
                lane.resume()

        async def look() -> None:
            while True:
                await asyncio.sleep(poll_s)
                lane.catch_up()

        tasks = [asyncio.ensure_future(disturb()), asyncio.ensure_future(look())]
        for index in range(count):
            await asyncio.sleep(rng.expovariate(rate))
            request = live(f"r{index}", rng.randint(1, 400), rng.randint(1, 120), at_s=loop.time())
            requests.append(request)
            lane.add(request)
            if index % 20 == 19:
                gone.append(requests[index - rng.randint(0, 15)])
                lane.remove(gone[-1:])
        await tasks[0]
        tasks[1].cancel()
        await asyncio.sleep(1000.0)
        assert {r for r in requests if r.is_done} == set(ended)
        assert {r for r in requests if not r.is_done} <= set(gone)
        assert lane.scheduler.num_free == lane.scheduler.num_blocks
        return facts(requests), lane.gaps.gaps(), lane.scheduler.totals

    return run_virtual(main())


SHAPES = [{}, {"num_stages": 3}, {"num_stages": 2, "lookahead": MODEL}, {"preemption": "swap"}, {"policy": "priority"}]


@pytest.mark.parametrize("options", SHAPES)
def test_the_same_load_gives_the_same_outcomes_bit_for_bit(options: dict[str, Any]) -> None:
    assert serve(**options) == serve(**options)


@pytest.mark.parametrize("options", SHAPES)
def test_every_token_but_a_requests_first_ends_one_gap(options: dict[str, Any]) -> None:
    found, gaps, totals = serve(**options)
    generated = [row[0] for row in found]
    assert sum(generated) == totals["total_generated_tokens"]
    assert sum(gaps.counts) == sum(generated) - sum(count > 0 for count in generated)


def test_runs_of_steps_are_what_single_steps_are() -> None:
    one_by_one, many = serve(OneByOne), serve()
    assert many[2] == one_by_one[2]
    for ours, theirs in zip(many[0], one_by_one[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


def test_looking_changes_nothing() -> None:
    seldom, often = serve(poll_s=1e6), serve(poll_s=0.003)
    assert seldom[2] == often[2]
    for ours, theirs in zip(seldom[0], often[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-9)


def test_a_request_alone_takes_the_time_of_its_steps() -> None:
    async def main() -> LiveRequest:
        lane = lane_of(FastScheduler(ROOM), [])
        request = live("a", 100, 4)
        await asyncio.sleep(1.0)
        lane.add(request)
        await asyncio.sleep(10.0)
        return request

    request = run_virtual(main())
    prefill_s = TIMES.step_s(Batch(0, 0, (Chunk(prefix_tokens=0, num_tokens=100),)))
    decodes_s = [TIMES.step_s(Batch(1, 101 + step)) for step in range(3)]
    assert request.scheduled_s == 1.0
    assert request.first_token_s == pytest.approx(1.0 + prefill_s)
    assert request.last_token_s == pytest.approx(1.0 + prefill_s + sum(decodes_s))
    assert request.longest_gap_s == pytest.approx(max(decodes_s))


def test_a_run_is_cut_at_the_end_of_the_step_that_an_arrival_meets() -> None:
    async def main() -> tuple[LiveRequest, LiveRequest]:
        lane = lane_of(FastScheduler(ROOM), [])
        a, b = live("a", 10, 1000), live("b", 10, 10)
        lane.add(a)
        await asyncio.sleep(1.0)
        lane.add(b)
        await asyncio.sleep(1.0)
        return a, b

    _, b = run_virtual(main())
    ends_s = [TIMES.step_s(Batch(0, 0, (Chunk(prefix_tokens=0, num_tokens=10),)))]
    while ends_s[-1] < 1.0:
        ends_s.append(ends_s[-1] + TIMES.step_s(Batch(1, 10 + len(ends_s))))
    assert b.scheduled_s == pytest.approx(ends_s[-1])


@pytest.mark.parametrize("options", [{}, {"num_stages": 2}])
def test_a_pause_begins_at_a_step_boundary_and_nothing_runs_in_it(options: dict[str, Any]) -> None:
    async def main() -> tuple[float, LiveRequest]:
        loop = asyncio.get_running_loop()
        lane = lane_of(FastScheduler(ROOM, SchedulerOptions(**options)), [])
        request = live("a", 10, 500)
        lane.add(request)
        await asyncio.sleep(0.5)
        await lane.pause()
        paused_s, before = loop.time(), request.num_generated
        assert paused_s == pytest.approx(request.last_token_s)
        lane.add(live("b", 10, 5))
        await asyncio.sleep(3.0)
        assert request.num_generated == before
        lane.resume()
        await asyncio.sleep(60.0)
        return paused_s, request

    paused_s, request = run_virtual(main())
    assert 0.5 <= paused_s < 0.52
    assert request.is_done
    assert request.longest_gap_s > 3.0


def test_a_stall_delays_all_that_holds_kv_and_is_counted() -> None:
    async def main(stall_s: float) -> LiveRequest:
        lane = lane_of(FastScheduler(ROOM), [])
        request = live("a", 10, 100)
        lane.add(request)
        await asyncio.sleep(0.1)
        if stall_s:
            lane.stall(stall_s)
        await asyncio.sleep(60.0)
        return request

    free, stalled = run_virtual(main(0.0)), run_virtual(main(2.5))
    assert stalled.last_token_s == pytest.approx((free.last_token_s or 0.0) + 2.5)
    assert stalled.stalls_s == 2.5


def test_a_request_that_leaves_in_the_middle_of_a_step_leaves_at_its_end() -> None:
    async def main() -> None:
        ended: list[LiveRequest] = []
        lane = lane_of(FastScheduler(ROOM), ended)
        request = live("a", 10, 1000)
        lane.add(request)
        await asyncio.sleep(0.5)
        lane.remove([request])
        assert lane.scheduler.running == [request]
        await asyncio.sleep(0.1)
        assert not lane.scheduler.running
        assert lane.scheduler.num_free == ROOM.num_blocks
        assert not ended

    run_virtual(main())


def test_swapping_takes_its_time() -> None:
    async def main(swap_s: float) -> float:
        room, ended = capacity(num_blocks=6), list[LiveRequest]()
        scheduler = FastScheduler(room, SchedulerOptions(preemption="swap"))
        lane = lane_of(scheduler, ended, swap_s=lambda out_bytes, in_bytes: swap_s)
        for name in ("a", "b"):
            lane.add(live(name, 8, 12))
        await asyncio.sleep(100.0)
        assert len(ended) == 2
        return max(request.last_token_s or 0.0 for request in ended)

    assert run_virtual(main(1.0)) == pytest.approx(run_virtual(main(0.0)) + 2.0)  # once out, once in


def test_requests_without_room_stay_where_they_are() -> None:
    async def main() -> None:
        lane = lane_of(FastScheduler(capacity(num_blocks=4, block_size=4)), [])
        big = live("b", 12, 3)
        big.num_generated = 1
        assert lane.admit(big, 12)
        other = live("c", 8, 3)
        other.num_generated = 1
        assert not lane.admit(other, 8)
        await asyncio.sleep(1.0)
        assert big.is_done
        assert lane.admit(other, 8)

    run_virtual(main())
