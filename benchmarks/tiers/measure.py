"""What is compared: plain vLLM, vLLM with its own CPU offload where it runs, and tiers; in turn, a process each."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import engine_flags
from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.environment import process_environment

BLOCK_BYTES = 4 * 32 * 2 * 2 * 64 * 4  # of the demo model in float32: layers, tokens, K and V, heads, head size
START_TIMEOUT_S = 600.0
PLAIN, OFFLOAD, TIERS = "plain vLLM", "vLLM with its own CPU offload", "tiers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run. Sizes are requests, tokens of a prompt, tokens of an answer."""

    model: Path
    rounds: int = 3
    device_blocks: int = 128  # 4,096 tokens
    host_blocks: int = 1024
    seed: int = 11
    burst: Mapping[str, int] = field(default_factory=lambda: {"requests": 24, "prompt": 512, "output": 192})
    churn: Mapping[str, int] = field(default_factory=lambda: {"requests": 20, "prompt": 96, "output": 256})
    unused: Mapping[str, int] = field(default_factory=lambda: {"requests": 8, "prompt": 96, "output": 200})
    turns: Mapping[str, int] = field(default_factory=lambda: {"requests": 32, "prompt": 640, "output": 16, "more": 16})
    engine: Mapping[str, Any] = field(default_factory=partial(engine_flags, max_num_seqs=64))

    def given(self, system: str, round_index: int) -> dict[str, Any]:
        """What the worker of one system gets."""
        engine = {**self.engine, "kv_cache_memory_bytes": self.device_blocks * BLOCK_BYTES}
        scenarios = {name: dict(getattr(self, name)) for name in ("burst", "churn", "unused", "turns")}
        found: dict[str, Any] = {"engine": engine, "seed": self.seed + round_index, **scenarios}
        if system == TIERS:
            found["host_bytes"] = self.host_blocks * BLOCK_BYTES
        if system == OFFLOAD:
            engine["kv_offloading_size"] = self.host_blocks * BLOCK_BYTES / (1 << 30)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one engine did in one round; `failure`: why it does not run here."""

    system: str
    round_index: int
    found: Mapping[str, Any]
    failure: str = ""


def measure(plan: Plan, on_run: Callable[[Run], None]) -> None:
    """All rounds; a system that does not run is not tried again."""
    failed: set[str] = set()
    for round_index in range(plan.rounds):
        for system in _order(round_index):
            if system not in failed:
                run = _run(plan, system, round_index)
                failed |= {system} if run.failure else set()
                on_run(run)


def _order(round_index: int) -> Iterator[str]:
    systems = (PLAIN, TIERS, OFFLOAD)
    yield from systems if round_index % 2 == 0 else reversed(systems)


def _run(plan: Plan, system: str, round_index: int) -> Run:
    own = process_environment(InstanceConfig(app="bench", model=str(plan.model)))
    environment = {**os.environ, **own, "PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    given = json.dumps(plan.given(system, round_index))
    command = [sys.executable, "-m", "benchmarks.tiers.worker", str(plan.model), given]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return Run(system=system, round_index=round_index, found=json.loads(line.removeprefix("RESULT")))
    if system != OFFLOAD:
        raise RuntimeError(f"{system} failed:\n{done.stderr[-3000:]}")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no output"]
    told = [line for line in lines if "Error" in line] or lines
    failure = f"{told[-1]} (exit status {done.returncode})"
    return Run(system=system, round_index=round_index, found={}, failure=failure)
