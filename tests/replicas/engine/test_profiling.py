"""Laws of timing steps: batches fit, each is one step, and the lane is as it was."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.planners.types.step_cost import StepCost
from pengserve.planners.types.units import blocks_for
from pengserve.replicas.engine.idle_profile import NUM_BATCHES
from pengserve.replicas.engine.profiling import choose_batches
from pengserve.replicas.environment import process_environment
from tests.support.processes import ENGINE, OFFLINE

pytestmark = pytest.mark.slow

capacities = st.builds(
    KvCapacity,
    num_blocks=st.integers(64, 4000),
    block_size=st.sampled_from([16, 32]),
    bytes_per_block=st.just(1),
    max_model_len=st.integers(128, 8192),
    max_num_seqs=st.integers(16, 256),
    weight_bytes=st.just(1),
)


@given(capacities, st.integers(64, 4096), st.integers(0, 100))
def test_chosen_batches_fit_the_lane(capacity: KvCapacity, max_tokens: int, seed: int) -> None:
    batches = choose_batches(capacity, max_tokens, 12, seed, repetitions=5)
    assert len(batches) == 12 and batches == choose_batches(capacity, max_tokens, 12, seed, repetitions=5)
    for chunks in batches:
        assert 0 < len(chunks) <= capacity.max_num_seqs
        assert sum(chunk.num_tokens for chunk in chunks) <= max_tokens
        lengths = [chunk.prefix_tokens + chunk.num_tokens for chunk in chunks]
        assert max(lengths) + 6 < capacity.max_model_len
        assert sum(blocks_for(n + 6, capacity.block_size) for n in lengths) <= capacity.num_blocks


@given(capacities, st.integers(64, 4096))
def test_every_mix_is_chosen(capacity: KvCapacity, max_tokens: int) -> None:
    batches = choose_batches(capacity, max_tokens, 30)
    assert any(all(chunk.num_tokens == 1 for chunk in chunks) for chunks in batches)
    assert any(all(chunk.num_tokens > 1 for chunk in chunks) for chunks in batches)
    assert any(len({chunk.num_tokens > 1 for chunk in chunks}) == 2 for chunks in batches)


@pytest.fixture(scope="module")
def profiled(model: Path) -> dict[str, Any]:
    """What an engine tells that was profiled."""
    own = process_environment(InstanceConfig(app="tests", model=str(model)))
    command = [sys.executable, "-m", "tests.support.profiled_engine", str(model), json.dumps(ENGINE)]
    environment = {**os.environ, **OFFLINE, **own}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT"))
    return found


def test_each_batch_is_timed_as_it_was_chosen(profiled: dict[str, Any]) -> None:
    assert len(profiled["samples"]) == len(profiled["batches"]) == 9
    for sample, chunks in zip(profiled["samples"], profiled["batches"], strict=True):
        assert 0 < sample["host_s"] < sample["seconds"]
        asked = [(c["prefix_tokens"] + (2 if c["num_tokens"] == 1 else 0), c["num_tokens"]) for c in chunks]
        assert sorted((c["prefix_tokens"], c["num_tokens"]) for c in sample["chunks"]) == sorted(asked)


def test_idle_time_is_given_up_for_requests_and_changes_nothing(profiled: dict[str, Any]) -> None:
    idle = profiled["idle"]
    assert not idle["began_at_once"] and idle["rounds"] > 3 and not idle["changed"]
    assert idle["answers"] == profiled["before"]
    assert idle["model"]["load_s"] >= 0


def test_what_the_judge_is_told_that_steps_cost_is_what_they_took(profiled: dict[str, Any]) -> None:
    idle = profiled["idle"]
    costs = {shape: StepCost(**terms) for shape, terms in idle["costs"].items()}
    assert set(costs) == {"dp", "pp2"}
    ratios, wide = [], []
    for sample in idle["samples"]:
        chunks = sample["chunks"]
        tokens = sum(c["num_tokens"] for c in chunks)
        context = tokens + sum(c["prefix_tokens"] for c in chunks)
        pairs = sum(c["num_tokens"] * (c["num_tokens"] + 2 * c["prefix_tokens"]) for c in chunks if c["num_tokens"] > 1)
        ratios.append(costs["dp"].step_s(tokens, len(chunks), context, pairs) / sample["seconds"])
        wide.append(costs["pp2"].step_s(tokens, len(chunks), context, pairs) / sample["seconds"])
    assert len(ratios) == NUM_BATCHES
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.3)
    assert statistics.median(wide) > statistics.median(ratios), "each stage has what is no work of layers"


def test_a_profiled_lane_is_as_it_was(profiled: dict[str, Any]) -> None:
    assert profiled["after"] == profiled["before"] and all(profiled["before"])
    assert profiled["free"][0] == profiled["free"][1]
    assert profiled["held"] == [0, 0, 0]


def test_batches_that_are_no_single_step_are_refused(profiled: dict[str, Any]) -> None:
    assert "in one step" in profiled["refusals"][0]
    assert "no room" in profiled["refusals"][1]
