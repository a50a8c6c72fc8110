"""How fast a lane is simulated: `python -m benchmarks.simulator_speed [--vllm]`.

Prints microseconds per step of each scheduler, and tokens that a lane gives out per second. Seconds are of this process
on its core, so that other work on the machine counts little.
"""

import argparse
import asyncio
import gc
import math
import random
import time
from typing import Any

from pengserve.planners.cost_model import CostModel
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.clock import run_virtual
from pengserve.simulator.engine.fast_scheduler import FastScheduler
from pengserve.simulator.engine.lane import SimLane
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.pipeline_lane import PipelineLane
from pengserve.simulator.requests import Arrival, LiveRequest
from pengserve.simulator.timing.steps import Batch

MODEL = CostModel(prefix_attention_s=1e-9, self_attention_s=1e-9, kv_read_s=1e-8, ffn_s=2e-5, other_s=1e-5, load_s=5e-3)
ROOM = KvCapacity(
    num_blocks=20_000, block_size=16, bytes_per_block=1, max_model_len=32_768, max_num_seqs=256, weight_bytes=0
)
BATCHES = (1, 16, 64, 256)
STEPS = 400
REQUESTS = 2000
TOKEN_S = MODEL.prefix_attention_s + MODEL.kv_read_s  # a decode reads a token of its context


class Times:
    """`StepTimes` by one cost model."""

    def step_s(self, batch: Batch) -> float:
        """See `StepTimes`."""
        decodes_s = (MODEL.ffn_s + MODEL.other_s) * batch.num_decodes + TOKEN_S * batch.context_tokens
        return MODEL.load_s + decodes_s + sum([MODEL.chunk_s(chunk) for chunk in batch.prefills])

    def decodes_s(self, batch: Batch, num_steps: int) -> float:
        """See `StepTimes`."""
        return num_steps * self.step_s(batch) + TOKEN_S * batch.num_decodes * num_steps * (num_steps - 1) / 2

    def steps_within(self, batch: Batch, seconds: float) -> int:
        """See `StepTimes`."""
        half_s = TOKEN_S * batch.num_decodes / 2
        first_s = self.step_s(batch) - half_s
        return int((math.sqrt(first_s * first_s + 4 * half_s * seconds) - first_s) / (2 * half_s))


def main() -> None:
    """Measures all, and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true", help="vLLM's scheduler as well; it is imported for ten seconds")
    arguments = parser.parse_args()
    kinds: dict[str, Any] = {"fast": FastScheduler}
    if arguments.vllm:
        from pengserve.simulator.engine.vllm_scheduler import VllmScheduler

        kinds["vLLM"] = VllmScheduler
    gc.collect()
    gc.freeze()
    print("decode steps, microseconds each")
    for name, kind in kinds.items():
        for batch in BATCHES:
            print(f"  {name:5} batch {batch:4}: {step_us(kind, batch):8.1f}")
    print("lanes: 2,000 requests of 10-2,000 and 1-400 tokens, 8 a second")
    for name, kind in kinds.items():
        for shape, options in (
            ("dp", SchedulerOptions()),
            ("pp2, token count", SchedulerOptions(num_stages=2)),
            ("pp2, lookahead", SchedulerOptions(num_stages=2, lookahead=MODEL)),
        ):
            print(f"  {name:5} {shape:17}: {lane_speed(kind, options)}")


def step_us(kind: Any, batch: int) -> float:
    """Microseconds of one decode step, one by one, of so many requests that are far from their end."""
    scheduler = kind(ROOM, SchedulerOptions(max_num_batched_tokens=8192))
    for request in requests(batch, 200, 200, 10_000, 10_000):
        scheduler.add(request)
    best_s, steps = math.inf, STEPS // 4
    for round_ in range(5):
        started_s = time.process_time()
        for _ in range(steps):
            scheduler.finish(scheduler.schedule())
        if round_:  # the first one has the prompts
            best_s = min(best_s, time.process_time() - started_s)
    return best_s / steps * 1e6


def lane_speed(kind: Any, options: SchedulerOptions) -> str:
    """One lane under load, all told."""

    async def serve() -> tuple[SimLane, list[LiveRequest]]:
        loop, rng, ended = asyncio.get_running_loop(), random.Random(1), list[LiveRequest]()
        scheduler = kind(ROOM, options)
        if options.num_stages > 1:
            lane: SimLane = PipelineLane(scheduler, Times(), on_end=ended.extend, transfer_s=lambda batch: 1e-4)
        else:
            lane = SimLane(scheduler, Times(), on_end=ended.extend)
        for request in requests(REQUESTS, 10, 2000, 1, 400):
            await asyncio.sleep(rng.expovariate(8.0))
            lane.add(request)
        await asyncio.sleep(3600.0)
        assert len(ended) == REQUESTS, f"{REQUESTS - len(ended)} requests have not ended after {loop.time()} s"
        return lane, ended

    started_s = time.process_time()
    lane, ended = run_virtual(serve())
    seconds = time.process_time() - started_s
    tokens, steps = sum(request.num_generated for request in ended), lane.scheduler.totals["step"]
    return (
        f"{seconds:6.2f} s for {steps:,} steps ({seconds / steps * 1e6:.1f} us each); {tokens / seconds:,.0f} tokens/s"
    )


def requests(count: int, *lengths: int) -> list[LiveRequest]:
    """Requests of random lengths: least and most prompt tokens, least and most output tokens."""
    rng, (prompt, most_prompt, output, most_output) = random.Random(0), lengths
    return [
        LiveRequest(
            arrival=Arrival(
                request_id=f"r{index}",
                at_s=float(index),
                prompt_tokens=rng.randint(prompt, most_prompt),
                output_tokens=rng.randint(output, most_output),
            )
        )
        for index in range(count)
    ]


if __name__ == "__main__":
    main()
