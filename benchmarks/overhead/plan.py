"""What is measured: engine flags, load levels, prompts. One frozen value, written into every result."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import engine_flags, text

SERVED_NAME = "bench"
KV_BYTES = 8 << 30  # of an instance, where several systems share the GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One load: so many clients, each sends its next request as soon as the last one ended."""

    num_clients: int
    num_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark run. The same for every system in it."""

    model: Path
    device: str = "cpu"
    num_instances: int = 2
    num_sharing: int = 1  # systems that are up at the same time
    rounds: int = 3
    levels: tuple[Level, ...] = (
        Level(num_clients=1, num_requests=16),
        Level(num_clients=8, num_requests=96),
        Level(num_clients=32, num_requests=256),
    )
    min_words: int = 50  # a word is 1.2 tokens of the demo model
    max_words: int = 150
    output_tokens: int = 64
    level_timeout_s: float = 60.0
    start_timeout_s: float = 240.0
    seed: int = 7
    engine: Mapping[str, Any] = field(default_factory=partial(engine_flags, max_num_batched_tokens=2048))

    @classmethod
    def on_gpus(cls, model: Path, rounds: int, num_instances: int, num_sharing: int = 1) -> "Plan":
        """One instance a GPU, with vLLM's own defaults: asynchronous scheduling, compilation, full CUDA graphs.

        Where several systems share the GPUs, each has `KV_BYTES`: what is free changes while others start.
        """
        shared = {"gpu_memory_utilization": 0.9 / num_sharing, "kv_cache_memory_bytes": KV_BYTES}
        return cls(
            model=model,
            device="cuda",
            num_instances=num_instances,
            num_sharing=num_sharing,
            rounds=rounds,
            levels=tuple(Level(num_clients=n, num_requests=count) for n, count in ((1, 16), (8, 128), (64, 1024))),
            output_tokens=128,
            level_timeout_s=300.0,
            start_timeout_s=900.0,
            engine={"max_model_len": 4096, "enable_prefix_caching": True} | (shared if num_sharing > 1 else {}),
        )

    def prompts(self, round_index: int, level: Level) -> list[str]:
        """The prompts of one level: equal for all systems, all different, so that no prefix is found in a cache."""
        source = random.Random(f"{self.seed}/{round_index}/{level.num_clients}")
        return [text(source, source.randint(self.min_words, self.max_words)) for _ in range(level.num_requests)]
