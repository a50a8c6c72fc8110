"""One engine in a process of its own: `python -m benchmarks.tiers.worker MODEL JSON` prints one JSON line.

All scenarios run on it, one after the other. The prefix cache is emptied between them.
"""

import json
import random
import statistics
import sys
import time
from typing import Any

from vllm import SamplingParams

from pengserve.replicas.engine.lanes.dp_lane import DpLane
from tests.support.tiered_engine import Driver, opened

VOCABULARY = 2000


class Measured:
    """An engine, and what its totals were when a scenario began."""

    def __init__(self, lane: DpLane, seed: int) -> None:
        self._lane, self._random = lane, random.Random(seed)
        self._before = self._totals()

    def prompts(self, count: int, num_tokens: int) -> list[list[int]]:
        """Random prompts, all different."""
        return [[self._random.randrange(3, VOCABULARY) for _ in range(num_tokens)] for _ in range(count)]

    def run(self, name: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """All requests come at once; what their answers and the engine's totals say."""
        driver = Driver(self._lane, 0, 0.0, checks=False)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self._before = self._totals()
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        driver.run([(f"{name}-{i}", prompt, params) for i, prompt in enumerate(prompts)], 1.0)
        seconds = time.perf_counter() - started_s
        ttft_s = sorted(first_s - started_s for first_s in driver.first_s.values())
        grown = {key: value - self._before[key] for key, value in self._totals().items()}
        return {
            "seconds": seconds,
            "cpu_s": time.process_time() - started_cpu_s,
            "tokens_per_s": sum(map(len, driver.tokens.values())) / seconds,
            "ttft_mean_s": statistics.mean(ttft_s),
            "ttft_cpu_s": statistics.mean(driver.first_cpu_s.values()) - started_cpu_s,
            "tokens_per_cpu_s": sum(map(len, driver.tokens.values())) / (time.process_time() - started_cpu_s),
            "num_steps": len(driver.steps_s),
            "step_cpu_s": (time.process_time() - started_cpu_s) / len(driver.steps_s),
            "ttft_p99_s": ttft_s[int(0.99 * (len(ttft_s) - 1))],
            "step_s": statistics.median(driver.steps_s),
            "answers": [driver.tokens[f"{name}-{i}"] for i in range(len(prompts))],
            **grown,
        }

    def _totals(self) -> dict[str, float]:
        stats = self._lane.stats()
        names = (
            "total_preemptions",
            "total_prefix_hits",
            "total_parked",
            "total_host_hits",
            "total_staged_bytes",
            "total_brought_bytes",
            "total_evicted_bytes",
            "total_behind_bytes",
            "total_reused_bytes",
            "total_copy_wait_s",
        )
        return {name.removeprefix("total_"): getattr(stats, name) for name in names}


def measure(lane: DpLane, given: dict[str, Any]) -> dict[str, Any]:
    """All scenarios."""
    measured, found = Measured(lane, given["seed"]), {}
    measured.run("warm", measured.prompts(4, 64), 16)
    lane.reset_prefix_cache()
    for name in ("unused", "burst", "churn"):  # the first before any KV has left its home
        if (size := given.get(name)) is not None:
            found[name] = measured.run(name, measured.prompts(size["requests"], size["prompt"]), size["output"])
            lane.reset_prefix_cache()
    if (size := given.get("turns")) is not None:
        prompts = measured.prompts(size["requests"], size["prompt"])
        found["first turns"] = measured.run("first", prompts, size["output"])
        more = measured.prompts(size["requests"], size["more"])
        answers = found["first turns"]["answers"]
        second = [p + a + m for p, a, m in zip(prompts, answers, more, strict=True)]
        found["second turns"] = measured.run("second", second, size["output"])
    for scenario in found.values():
        scenario["answers"] = hash(str(scenario["answers"]))  # to be compared within one run, with one hash seed
    return found


def main(model: str, given: dict[str, Any]) -> None:
    """Builds the engine, measures, prints."""
    with opened(model, given) as lanes:
        lane = lanes.dp
        found = {
            "num_blocks": lane.capacity.num_blocks,
            "device_blocks": lane.tiers.pool.num_blocks if lane.tiers is not None else lane.capacity.num_blocks,
            "scenarios": measure(lane, given),
        }
        print("RESULT" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
