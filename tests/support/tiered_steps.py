"""What a host tier costs that is not used: `python -m tests.support.tiered_steps MODEL JSON` prints one JSON line.

One engine decodes the same load in turn with its host tier and as vLLM would without one, in processor time: first with
all KV at home, then with KV in other blocks' places, as it is once more blocks have been in use than the device has.
"""

import json
import random
import statistics
import sys
import time
from typing import Any

from vllm import SamplingParams

from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.tiers.tier_runner import TierRunner
from tests.support.tiered_engine import VOCABULARY, Driver

ROUNDS, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 24, 8, 64, 60


class Ways:
    """Steps of one lane with its host tier, and as without one."""

    def __init__(self, lane: DpLane) -> None:
        self._lane, self._runner, self._residency = lane, lane.worker.model_runner, lane.residency
        self._hooks: TierRunner = self._runner.execute_model.__self__
        self._tables = self._runner.input_batch.block_table
        self._buffer = self._tables[0].block_table
        self._commit, self._shown = self._tables.commit_block_table, self._buffer.gpu
        assert self._residency is not None and self._shown is not self._buffer.cpu

    def take(self, *, is_on: bool) -> None:
        """From the next step on."""
        runner, hooks = self._runner, self._hooks
        self._lane.residency = self._residency if is_on else None
        runner.execute_model = hooks.execute_model if is_on else hooks._execute
        runner._model_forward = hooks.model_forward if is_on else hooks._forward
        self._buffer.gpu = self._shown if is_on else self._buffer.cpu
        self._tables.commit_block_table = (
            self._commit if is_on else type(self._tables).commit_block_table.__get__(self._tables)
        )


def decode(lane: DpLane, name: str, rng: random.Random) -> list[float]:
    """Seconds of each step after the prompts."""
    driver, found = Driver(lane, 0, 0.0, checks=False), []
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    for index in range(REQUESTS):
        driver.add(f"{name}-{index}", [rng.randrange(3, VOCABULARY) for _ in range(PROMPT_TOKENS)], params)
    for _ in range(-(-REQUESTS * PROMPT_TOKENS // lane.scheduler.max_step_tokens) + 1):
        lane.step()
    while lane.num_requests():
        started_s = time.thread_time()
        lane.step()
        found.append(time.thread_time() - started_s)
    return found


def compared(lane: DpLane, ways: Ways, rng: random.Random) -> dict[str, float]:
    """Medians of steps with the host tier and without, and the median of the rounds' ratios."""
    assert lane.tiers is not None
    rounds: list[dict[bool, float]] = []
    mapped = lane.tiers.counts.mapped_steps
    for index in range(ROUNDS):
        found = {}
        for is_on in (True, False) if index % 2 == 0 else (False, True):
            ways.take(is_on=is_on)
            found[is_on] = statistics.median(decode(lane, f"{index}-{is_on}", rng))
        rounds.append(found)
    ways.take(is_on=True)
    return {
        "on_s": statistics.median(found[True] for found in rounds),
        "off_s": statistics.median(found[False] for found in rounds),
        "ratio": statistics.median(found[True] / found[False] for found in rounds),
        "mapped": lane.tiers.counts.mapped_steps - mapped,
    }


def main(model: str, given: dict[str, Any]) -> None:
    """Prints what was compared at home and elsewhere."""
    engine = {**given["engine"], "enable_prefix_caching": False}
    lane = DpLane(InstanceConfig(app="tests", model=model, engine=engine, host_bytes=given["host_bytes"]))
    assert lane.tiers is not None
    rng = random.Random(1)
    decode(lane, "warm", rng)
    ways = Ways(lane)
    home = compared(lane, ways, rng)
    lane.lend(lane.tiers.pool.num_blocks)  # what is left are blocks that have no home
    print("RESULT" + json.dumps({"home": home, "elsewhere": compared(lane, ways, rng)}), flush=True)
    lane.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
