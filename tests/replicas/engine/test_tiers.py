"""Laws of an engine with a host tier: its tokens are plain vLLM's, with KV anywhere and any requests parked."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import ConfigError
from pengserve.replicas.engine.idle_profile import NUM_BATCHES
from pengserve.replicas.engine.tiers.tier_memory import TierOptions, host_bytes_of, tier_sizes
from pengserve.replicas.environment import process_environment
from tests.support.processes import ENGINE, OFFLINE

pytestmark = pytest.mark.slow

BLOCK_BYTES = 4 * 16384  # of the tiny model, over its four layers
WORK = {"lengths": [40, 150, 300, 600, 100, 900, 70, 400, 250, 600, 350, 128], "max_tokens": 40, "turns": 2}


def run(
    model: Path, device_blocks: int, host_blocks: int = 0, *, module: str = "tiered_engine", **given: Any
) -> dict[str, Any]:
    """What a module of `tests.support` found."""
    engine = {**ENGINE, "kv_cache_memory_bytes": device_blocks * BLOCK_BYTES}
    work = {**WORK, "engine": engine, "host_bytes": host_blocks * BLOCK_BYTES, **given}
    environment = {**os.environ, **OFFLINE, **process_environment(InstanceConfig(app="tests", model=str(model)))}
    command = [sys.executable, "-m", f"tests.support.{module}", str(model), json.dumps(work)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return found


@pytest.fixture(scope="module")
def plain(model: Path) -> dict[str, Any]:
    """vLLM's own answers, with room for everything."""
    return run(model, 400)


def test_tokens_are_plain_vllm_s_where_the_device_is_too_small(model: Path, plain: dict[str, Any]) -> None:
    found = run(model, 40, 300, orders=0.2, seed=3)
    assert found["tokens"] == plain["tokens"]
    assert found["counts"]["staged"] > 0 and found["parks"] > found["orders"] > 0
    assert found["preemptions"] == 0, "what vLLM would preempt is parked"
    assert found["hits"] == plain["hits"], "second turns find their first one, also on the host"
    assert found["to_host"] < found["counts"]["evicted"] / 2, "full blocks are written to the host once"


def test_over_a_slow_link_and_thrice_the_device(model: Path, plain: dict[str, Any]) -> None:
    found = run(model, 14, 300, orders=0.1, seed=5, link_bytes_per_s=4e8)
    assert found["tokens"] == plain["tokens"]
    assert max(WORK["lengths"]) > 2 * found["device_blocks"] * 32


@pytest.mark.parametrize("device_blocks", [40, 400])
def test_tokens_are_plain_vllm_s_under_a_churn_of_priorities(
    model: Path, plain: dict[str, Any], device_blocks: int
) -> None:
    engine = {**ENGINE, "kv_cache_memory_bytes": device_blocks * BLOCK_BYTES}
    engine |= {"scheduling_policy": "priority", "max_num_seqs": 3}
    found = run(model, device_blocks, 300, churn=0.5, seed=7, engine=engine)
    assert found["tokens"] == plain["tokens"]
    assert found["places_taken"] > 5 and found["preemptions"] == 0, "places change hands, nothing is computed again"


def test_tokens_are_plain_vllm_s_while_layers_are_placed_by_slos(model: Path, plain: dict[str, Any]) -> None:
    found = run(model, 24, 300, slo_s=0.05, seed=9, share=0.05)
    assert found["tokens"] == plain["tokens"] and found["preemptions"] == 0
    assert any(note["num_away"] for note in found["placements"]), "copies from memory hide behind a step"


def test_tokens_are_plain_vllm_s_while_requests_are_paused_for_slos(model: Path) -> None:
    """Over a link that brings a cell in several steps no layer is kept away, also on a slow machine."""
    work = {"lengths": [60] * 8, "turns": 1, "max_tokens": 120}
    found = run(model, 24, 300, slo_s=0.002, seed=9, share=0.5, link_bytes_per_s=1e6, **work)
    assert found["tokens"] == run(model, 400, **work)["tokens"] and found["preemptions"] == 0
    assert any("no layer away" in note["why"] for note in found["placements"]), found["placements"]
    assert not any(note["num_away"] for note in found["placements"]), found["placements"]


def test_idle_time_is_used_though_no_block_holds_anything_yet(model: Path) -> None:
    """A timed request reads blocks that nothing was written to, and those of the device alone."""
    found = run(model, 40, 300, module="tiered_profile")
    assert found["num_samples"] == NUM_BATCHES
    assert found["longest"] <= found["device_tokens"] and not found["broken"]


def test_a_full_host_falls_back_to_preemption(model: Path, plain: dict[str, Any]) -> None:
    found = run(model, 24, 20)
    assert found["tokens"] == plain["tokens"]
    assert found["preemptions"] > 0


@pytest.mark.parametrize("device_blocks", [40, 24])
def test_a_copy_that_fails_ends_the_host_tier_and_no_request(
    model: Path, plain: dict[str, Any], device_blocks: int
) -> None:
    """The device alone serves on. What is too long for it goes elsewhere."""
    found = run(model, device_blocks, 300, orders=0.2, seed=3, breaks_at=40)
    assert found["tier_failure"].endswith("(MemoryError: no memory for a copy)")
    assert found["device_blocks"] == 0, "no tiers"
    longest = (device_blocks - 1) * 32
    sizes = {name: WORK["lengths"][int(name[2:])] + 40 + 43 * int(name[0]) for name in plain["tokens"]}
    assert all(sizes[name] >= longest for name in found["gone"])
    assert bool(found["gone"]) == (max(WORK["lengths"]) > longest)
    for name, tokens in found["tokens"].items():
        assert tokens == plain["tokens"][name][: len(tokens)]
        assert name in found["gone"] or len(tokens) == len(plain["tokens"][name])


@pytest.mark.shapes
def test_a_host_tier_that_is_not_used_costs_next_to_nothing(model: Path) -> None:
    found = run(model, 400, 400, module="tiered_steps")
    for where, steps in found.items():
        print(
            f"\n  {where}: a step takes {steps['on_s'] * 1e3:.3f} ms, {steps['ratio']:.3f} of one without a host tier"
        )
    assert found["home"]["mapped"] == 0, "all KV is at home: vLLM's own tables are right"
    assert found["elsewhere"]["mapped"] > 0
    assert max(steps["ratio"] for steps in found.values()) < 1.05, "the aim is 1.02, on an idle machine"


SIZES = {"num_layers": 4, "block_size": 32, "block_bytes": 16384, "page_bytes": 4096}


def test_the_scheduler_gets_the_blocks_of_both_tiers() -> None:
    sizes = tier_sizes(**SIZES, device_bytes=100 * BLOCK_BYTES, host_bytes=300 * BLOCK_BYTES, max_model_len=1024)
    assert sizes.num_blocks == 400 - sizes.reserved_blocks
    assert sizes.reserved_blocks == 1 + 32 // 4, "a request of the longest kind can be staged once the host is full"


@pytest.mark.parametrize(("device_blocks", "host_bytes", "key"), [(9, 1 << 30, "max_model_len"), (100, 99, "host_byt")])
def test_sizes_that_cannot_work_are_refused_in_a_sentence(device_blocks: int, host_bytes: int, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        tier_sizes(**SIZES, device_bytes=device_blocks * BLOCK_BYTES, host_bytes=host_bytes, max_model_len=1024)


def test_a_host_tier_beyond_the_node_s_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory\.host_bytes of .* is more than 90% of"):
        host_bytes_of(TierOptions(host_bytes=1 << 50), 0)
    assert host_bytes_of(TierOptions(host_bytes=-1), 0) > 0
