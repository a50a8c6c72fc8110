"""An engine in a process of its own that only times batches. `pengserve profile` and benchmarks use it.

    python -m pengserve.replicas.profile_process INSTANCE_JSON PLAN_JSON     one JSON line a fact or sample

The process gets its environment before Python starts, as instances do, and ends with the measurement.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pengserve.planners.cost_model import Sample
from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import ConfigError, EngineError
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.environment import process_environment

QUIET = {"VLLM_LOGGING_LEVEL": "WARNING"}
FACTS, SAMPLE = "FACTS", "SAMPLE"  # how the lines begin that are ours
_INSTALL = "run `pip install 'pengserve[cpu]'` (or `[gpu]` on a machine with CUDA)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePlan:
    """What is timed."""

    num_batches: int
    rounds: int  # each round times all batches, in an order of its own
    repetitions: int  # steps of a batch in one round
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the engine is, as it says itself."""

    device_name: str
    capacity: KvCapacity
    max_num_batched_tokens: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    value_bytes: int  # of a weight, before any quantisation
    kv_value_bytes: int


def find_device(wish: str) -> str:
    """`cpu` or `cuda`; `auto` is cuda where there is an NVIDIA driver.

    Raises:
        ConfigError: neither of the three.
    """
    if wish == "auto":
        return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    if wish not in ("cpu", "cuda"):
        raise ConfigError(f"there is no device {wish!r}: take auto, cpu or cuda")
    return wish


def profile_engine(
    config: InstanceConfig, plan: ProfilePlan, on_sample: Callable[[], None]
) -> tuple[EngineFacts, list[Sample]]:
    """Times every batch. A round gives the median of a batch's steps; the result is the least of all rounds.

    The least, because other processes on the machine can only make a step longer.

    Raises:
        ConfigError: vLLM is not installed.
        EngineError: the engine failed; with the last line that it wrote.
    """
    if find_spec("vllm") is None:
        raise ConfigError(f"timing an engine needs vllm, which is not installed: {_INSTALL}")
    # A step that is timed has to end before the next one begins.
    config = replace(config, engine={**config.engine, "async_scheduling": False})
    command = [sys.executable, "-m", __name__, json.dumps(to_data(config)), json.dumps(to_data(plan))]
    environment = {**os.environ, **QUIET, **process_environment(config)}
    facts: EngineFacts | None = None
    found: dict[int, list[Sample]] = {}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as words,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=words, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(FACTS):
                    facts = from_data(EngineFacts, json.loads(line.removeprefix(FACTS)))
                elif line.startswith(SAMPLE):
                    data = json.loads(line.removeprefix(SAMPLE))
                    found.setdefault(data["batch"], []).append(from_data(Sample, data["sample"]))
                    on_sample()
        except BaseException:
            process.kill()  # its samples have no reader any more
            raise
        if process.wait() or facts is None:
            words.seek(0)
            last = next((line.strip() for line in reversed(words.readlines()) if line.strip()), "it wrote no error")
            raise EngineError(f"the engine ended with status {process.returncode} after {len(found)} batches: {last}")
    return facts, [min(same, key=lambda sample: sample.seconds) for _, same in sorted(found.items())]


def main() -> None:
    """Starts the engine, runs every batch once, then times them all in each round."""
    from pengserve.replicas.engine.lanes.dp_lane import DpLane
    from pengserve.replicas.engine.profiling import choose_batches, describe, profile

    config, plan = from_data(InstanceConfig, json.loads(sys.argv[1])), from_data(ProfilePlan, json.loads(sys.argv[2]))
    lane = DpLane(config)
    facts = EngineFacts(capacity=lane.capacity, **describe(lane))
    _say(FACTS, to_data(facts))
    batches = choose_batches(lane.capacity, facts.max_num_batched_tokens, plan.num_batches, plan.seed, plan.repetitions)
    for _ in profile(lane, batches, 1):
        pass  # first touch of buffers and of sizes
    order = list(range(len(batches)))
    for round_index in range(plan.rounds):
        random.Random(round_index).shuffle(order)
        samples = profile(lane, [batches[index] for index in order], plan.repetitions)
        for index, sample in zip(order, samples, strict=True):
            _say(SAMPLE, {"batch": index, "sample": to_data(sample)})
    os._exit(0)  # vLLM's threads would only slow the end


def _say(mark: str, data: Any) -> None:
    sys.stdout.write(f"{mark}{json.dumps(data)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
