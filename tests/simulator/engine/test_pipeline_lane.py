"""Laws of a pipeline lane: stages share the work, microbatches follow each other, and idle stages are counted."""

import asyncio
from typing import Any

import pytest

from pengserve.planners.cost_model import Chunk
from pengserve.planners.types.errors import PlanError
from pengserve.simulator.clock import run_virtual
from pengserve.simulator.engine.fast_scheduler import FastScheduler
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.pipeline_lane import PipelineLane, Stages
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import Batch
from tests.simulator.engine.loads import MODEL, LinearTimes, capacity, live

ROOM, TIMES = capacity(num_blocks=4000, block_size=16, max_num_seqs=64), LinearTimes()


def serve(
    requests: list[LiveRequest], transfer_s: float = 0.0, pace: float = 1.0, **options: Any
) -> tuple[PipelineLane, float]:
    async def main() -> tuple[PipelineLane, float]:
        ended: list[LiveRequest] = []
        scheduler = FastScheduler(ROOM, SchedulerOptions(**{"num_stages": 2, **options}))
        lane = PipelineLane(scheduler, TIMES, on_end=ended.extend, transfer_s=lambda batch: transfer_s, pace=pace)
        for request in requests:
            lane.add(request)
        await asyncio.sleep(1000.0)
        assert len(ended) == len(requests)
        return lane, max(request.last_token_s or 0.0 for request in requests)

    return run_virtual(main())


def test_a_microbatch_takes_what_the_whole_model_does_and_its_transfers() -> None:
    request = live("a", 100, 1)
    serve([request], transfer_s=0.25, num_stages=3)
    whole_s = TIMES.step_s(Batch(0, 0, (Chunk(prefix_tokens=0, num_tokens=100),)))
    assert request.first_token_s == pytest.approx(whole_s + 2 * 0.25)


def test_chunks_of_one_prompt_follow_each_other_at_once() -> None:
    request = live("a", 400, 1)
    serve([request], max_num_batched_tokens=100)
    chunks = [Chunk(prefix_tokens=start, num_tokens=100) for start in range(0, 400, 100)]
    stage_s = [TIMES.step_s(Batch(0, 0, (chunk,))) / 2 for chunk in chunks]
    assert request.first_token_s == pytest.approx(sum(stage_s) + stage_s[-1])  # later chunks are the dearer ones


def test_one_request_alone_leaves_all_stages_but_one_idle() -> None:
    lane, _ = serve([live("a", 100, 200)], num_stages=4)
    assert lane.stages.bubble() == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("lookahead", [None, MODEL])
def test_stages_work_at_once(lookahead: Any) -> None:
    requests = [live(f"r{index}", 200, 50) for index in range(32)]
    lane, end_s = serve(requests, lookahead=lookahead)
    assert end_s < 0.75 * lane.stages.busy_s
    assert all(request.is_done for request in requests)


def test_stages_that_take_turns_on_one_processor_save_what_a_microbatch_costs_by_itself() -> None:
    def requests() -> list[LiveRequest]:
        return [live(f"r{index}", 40, 100) for index in range(16)]

    both, both_s = serve(requests(), lookahead=MODEL)
    turns, turns_s = serve(requests(), lookahead=MODEL, max_in_flight=1, pace=0.5)
    assert turns.stages.bubble() == pytest.approx(0.5, abs=0.01)
    assert turns.scheduler.totals["step"] < 0.6 * both.scheduler.totals["step"]
    assert turns_s < both_s


def test_lookahead_leaves_smaller_bubbles_than_counting_tokens() -> None:
    def prompts() -> list[LiveRequest]:
        return [live(f"r{index}", 60 + 1700 * (index % 7 == 0), 30 + index % 40) for index in range(120)]

    by_tokens, _ = serve(prompts(), num_stages=4)
    ahead, _ = serve(prompts(), num_stages=4, lookahead=MODEL)
    assert ahead.stages.bubble() < by_tokens.stages.bubble()


def test_stages_stand_idle_for_nothing_between_two_loads() -> None:
    stages = Stages(2)
    stages.enter(0.0, 1.0, 0.0, False)
    stages.drain()
    stages.enter(100.0, 1.0, 0.0, False)
    assert stages.bubble() == 0.0
    stages.enter(103.0, 1.0, 0.0, True)
    assert stages.idle_s == pytest.approx(2.0 + 2.0)
    assert stages.queued_bubble() == pytest.approx(4.0 / 6.0)


def test_a_pipeline_lane_needs_a_scheduler_of_a_pipeline() -> None:
    async def main() -> None:
        PipelineLane(FastScheduler(ROOM), TIMES, on_end=print, transfer_s=lambda batch: 0.0)

    with pytest.raises(PlanError, match="num_stages of 2 or more"):
        run_virtual(main())
