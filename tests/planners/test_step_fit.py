"""Steps that were timed one by one give back what they cost, in dp and in pipelines."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pengserve.planners.cost_model import Chunk, Sample
from pengserve.planners.step_fit import PIPELINE_BUBBLE, step_costs
from pengserve.planners.types.step_cost import StepCost

COST = StepCost(load_s=0.004, token_s=5e-5, extra_s=2e-5, seq_s=1e-4, context_s=2e-7, pair_s=3e-9)
HOST_S = 0.002


def timed(host_s: float = 0.0) -> Iterator[Sample]:
    """Steps of decodes, of prompts, and of both, which take what `COST` says, and `host_s` beside it."""
    draw = random.Random(3)
    for at in range(30):
        decodes = [Chunk(prefix_tokens=draw.randint(20, 2000), num_tokens=1) for _ in range(draw.randint(1, 60))]
        prompts = [
            Chunk(prefix_tokens=draw.choice((0, 300)), num_tokens=draw.randint(16, 500))
            for _ in range(draw.randint(1, 3))
        ]
        chunks = (*decodes * (at % 3 != 1), *prompts * (at % 3 != 0))
        tokens = sum(chunk.num_tokens for chunk in chunks)
        context = sum(chunk.prefix_tokens + chunk.num_tokens for chunk in chunks)
        pairs = sum(c.num_tokens * (c.num_tokens + 2 * c.prefix_tokens) for c in chunks if c.num_tokens > 1)
        layers_s = COST.step_s(tokens, len(chunks), context, pairs)
        yield Sample(chunks=chunks, seconds=layers_s + host_s, host_s=host_s)


def test_what_steps_took_is_found_again() -> None:
    found = step_costs(list(timed()), max_stages=1)
    assert set(found) == {"dp"}
    assert found["dp"].terms == pytest.approx(COST.terms, rel=1e-6)


def test_each_stage_of_a_pipeline_has_its_share_of_the_layers_and_all_that_is_beside_them() -> None:
    found = step_costs(list(timed(HOST_S)), max_stages=4)
    assert set(found) == {"dp", "pp2", "pp4"}
    for num_stages in (2, 4):
        pipeline = found[f"pp{num_stages}"]
        whole_s = (COST.load_s + num_stages * HOST_S) / (1.0 - PIPELINE_BUBBLE)
        assert pipeline.load_s == pytest.approx(whole_s, rel=1e-6)
        assert pipeline.token_s == pytest.approx(COST.token_s / (1.0 - PIPELINE_BUBBLE), rel=1e-6)


def test_no_term_is_negative_where_the_samples_contradict_it() -> None:
    faster = [replace(sample, seconds=0.01 / len(sample.chunks)) for sample in timed()]
    assert min(step_costs(faster, max_stages=2)["pp2"].terms) >= 0
