"""What a host tier costs that is not used: `python -m tests.support.tiered_steps MODEL JSON` prints one JSON line.

One engine decodes the same load in turn with its host tier and as vLLM would without one, in processor time.
"""

import json
import random
import statistics
import sys
import time
from typing import Any

from vllm import SamplingParams

from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.engine.dp_lane import DpLane
from pengserve.replicas.engine.tier_runner import TierRunner
from tests.support.tiered_engine import VOCABULARY, Driver

ROUNDS, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 12, 8, 64, 60


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


def main(model: str, given: dict[str, Any]) -> None:
    """Prints the medians, with the host tier and without, and how many steps had tables of their own."""
    engine = {**given["engine"], "enable_prefix_caching": False}
    lane = DpLane(InstanceConfig(app="tests", model=model, engine=engine, host_bytes=given["host_bytes"]))
    assert lane.residency is not None and lane.tiers is not None
    runner, residency, rng = lane.worker.model_runner, lane.residency, random.Random(1)
    hooks: TierRunner = runner.execute_model.__self__
    ways = {
        True: (residency, hooks.execute_model, hooks.model_forward),
        False: (None, hooks._execute, hooks._forward),
    }
    times: dict[bool, list[float]] = {True: [], False: []}
    decode(lane, "warm", rng)
    for index in range(ROUNDS):
        for is_on in (True, False) if index % 2 == 0 else (False, True):
            lane.residency, runner.execute_model, runner._model_forward = ways[is_on]
            times[is_on] += decode(lane, f"{index}-{is_on}", rng)
    on_s, off_s = (statistics.median(times[is_on]) for is_on in (True, False))
    print("RESULT" + json.dumps({"on_s": on_s, "off_s": off_s, "mapped": lane.tiers.counts.mapped_steps}), flush=True)
    lane.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
