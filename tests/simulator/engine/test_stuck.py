"""Requests that came with their KV and leave no block for each other."""

import asyncio

import pytest

from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.clock import run_virtual
from pengserve.simulator.engine.fast_scheduler import FastScheduler
from pengserve.simulator.engine.lane import SimLane
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.scheduler import LaneScheduler
from pengserve.simulator.requests import Arrival, LiveRequest
from tests.simulator.machines import LinearTimes

CAPACITY = KvCapacity(
    num_blocks=10, block_size=16, bytes_per_block=1 << 20, max_model_len=160, max_num_seqs=256, weight_bytes=0
)


def build(kind: str) -> LaneScheduler:
    """A scheduler of ten blocks."""
    if kind == "fast":
        return FastScheduler(CAPACITY, SchedulerOptions())
    from pengserve.simulator.engine.vllm_scheduler import VllmScheduler

    return VllmScheduler(CAPACITY, SchedulerOptions())


@pytest.mark.parametrize("kind", ["fast", pytest.param("vllm", marks=pytest.mark.slow)])
def test_one_gives_up_its_blocks_and_all_end(kind: str) -> None:
    async def main() -> list[LiveRequest]:
        ended: list[LiveRequest] = []
        lane = SimLane(build(kind), LinearTimes(1), on_end=ended.extend)
        await lane.pause()
        for name in "ab":
            arrival = Arrival(request_id=name, at_s=0.0, prompt_tokens=150, output_tokens=5)
            assert lane.admit(LiveRequest(arrival), 64)
        lane.resume()
        await asyncio.sleep(10)
        return ended

    assert sorted(request.request_id for request in run_virtual(main())) == ["a", "b"]
