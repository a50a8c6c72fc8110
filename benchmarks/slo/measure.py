"""What is compared: plain vLLM, every second layer on the host, PengServe with `memory.place_by_slo` and without; in
turn, a process each.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import engine_flags
from pengserve.planners.types.config import InstanceConfig
from pengserve.replicas.environment import process_environment

START_TIMEOUT_S = 900.0
FLOAT_BYTES = 4
PLAIN, STATIC, UNPLACED, PENGSERVE = "plain vLLM", "static", "host tier alone", "PengServe"
SYSTEMS = (PLAIN, STATIC, UNPLACED, PENGSERVE)
BURST, DECODES = "burst of long prompts", "long decodes"


def _size(
    *, streams: int, stream_prompt: int, stream_output: int, prompts: int = 0, prompt: int = 0, output: int = 0
) -> Mapping[str, int]:
    """Streams that begin at once, and prompts that come when each stream has made 20 tokens."""
    return locals()


def kv_bytes_per_token(model: Path) -> int:
    """Of all layers, in float32."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_size * FLOAT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run. Sizes are requests, tokens of a prompt, tokens of an answer."""

    model: Path
    rounds: int = 2
    device_blocks: int = 64  # 2,048 tokens
    host_blocks: int = 512
    link_bytes_per_s: float = 1e9
    # The SLO, in steps of a batch that fits: LayerKV's 200 ms are about six of its steps. In long decodes it is as long
    # as half of the layers take to come from the host, or every placement would keep it.
    slo_scales: Mapping[str, float] = field(default_factory=lambda: {BURST: 6.0, DECODES: 3.0})
    fitting: int = 4  # requests of that batch
    seed: int = 7
    # Answers take several times as long as their prompts: prompts wait for KV, not for compute, as in LayerKV's runs.
    scenarios: Mapping[str, Mapping[str, int]] = field(
        default_factory=lambda: {
            BURST: _size(streams=2, stream_prompt=64, stream_output=192, prompts=8, prompt=384, output=192),
            DECODES: _size(streams=10, stream_prompt=128, stream_output=256),
        }
    )
    engine: Mapping[str, Any] = field(default_factory=partial(engine_flags, max_num_seqs=64))

    def given(self, system: str, round_index: int, tbt_s: Mapping[str, float]) -> dict[str, Any]:
        """What the worker of one system gets; `tbt_s`: the SLO of each scenario."""
        block_bytes = kv_bytes_per_token(self.model) * self.engine["block_size"]
        engine = {**self.engine, "kv_cache_memory_bytes": self.device_blocks * block_bytes}
        found: dict[str, Any] = {
            "engine": engine, "system": system, "seed": self.seed + 10 * round_index, "fitting": self.fitting,
            "tbt_s": dict(tbt_s), "places_by_slo": system != UNPLACED,
            "scenarios": {name: dict(size) for name, size in self.scenarios.items()},
        }  # fmt: skip
        if system != PLAIN:
            found |= {"host_bytes": self.host_blocks * block_bytes, "link_bytes_per_s": self.link_bytes_per_s}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one engine did in one round."""

    system: str
    round_index: int
    tbt_s: Mapping[str, float]  # the SLO of each scenario
    found: Mapping[str, Any]


def measure(plan: Plan, on_run: Callable[[Run], None]) -> None:
    """All rounds. The SLOs follow from plain vLLM's steps with a batch that fits: the tenth quickest of a hundred, as
    other work on the machine stretches many of them.
    """
    calm = _found(plan, {**plan.given(PLAIN, 0, {}), "scenarios": {}})["calm"]
    tbt_s = {name: scale * calm["quick_step_s"] for name, scale in plan.slo_scales.items()}
    for index in range(plan.rounds):
        for system in SYSTEMS if index % 2 == 0 else reversed(SYSTEMS):
            found = _found(plan, plan.given(system, index, tbt_s))
            on_run(Run(system=system, round_index=index, tbt_s=tbt_s, found=found))


def _found(plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    own = process_environment(InstanceConfig(app="bench", model=str(plan.model)))
    environment = {**os.environ, **own, "PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "benchmarks.slo.worker", str(plan.model), json.dumps(given)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT"):
            return dict(json.loads(line.removeprefix("RESULT")))
    raise RuntimeError(f"{given['system']} failed:\n{done.stderr[-3000:]}")
