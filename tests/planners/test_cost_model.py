"""Laws of the cost model, its fits, and its refinement while it serves."""

import csv
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.cost_model import (
    MIN_SAMPLES,
    OUTLIER,
    REFIT_STEPS,
    TERMS,
    TILES,
    Chunk,
    CostModel,
    OnlineFit,
    Sample,
    fit,
    fit_token_count,
    relative_errors,
    tiled,
)
from pengserve.planners.types.errors import PlanError

TRUE = CostModel(prefix_attention_s=5e-8, self_attention_s=3e-8, kv_read_s=5e-7, ffn_s=7e-5, other_s=8e-5, load_s=4e-3)
Batch = tuple[Chunk, ...]

chunks = st.builds(Chunk, prefix_tokens=st.integers(0, 4000), num_tokens=st.integers(1, 2000))
models = st.builds(CostModel, tile_tokens=st.sampled_from(TILES), **{term: st.floats(0, 1e-3) for term in TERMS})


def batches(count: int, seed: int = 1) -> list[Batch]:
    """Decodes, prefill and both."""
    source = random.Random(seed)
    found = []
    for index in range(count):
        decodes = [(source.randrange(4000), 1) for _ in range(source.randrange(1, 32) if index % 3 else 0)]
        prefill = [(source.choice([0, 1500]), source.randrange(2, 900)) for _ in range(index % 3 % 2 * 2 + 1)]
        pairs = decodes + (prefill if index % 3 != 2 else [])
        found.append(tuple(Chunk(prefix_tokens=prefix, num_tokens=num) for prefix, num in pairs))
    return found


def samples(count: int, model: CostModel = TRUE, noise: float = 0.0, seed: int = 1) -> list[Sample]:
    source = random.Random(seed)
    return [
        Sample(chunks=batch, seconds=model.batch_s(batch) * (1 + source.uniform(-noise, noise)))
        for batch in batches(count, seed)
    ]


def close(model: CostModel, other: CostModel, within: float) -> bool:
    return all(getattr(model, term) == pytest.approx(getattr(other, term), rel=within) for term in TERMS)


def squared_error(model: CostModel, of: Sequence[Sample]) -> float:
    return float((relative_errors(model, of) ** 2).sum())


@given(models, st.lists(chunks, max_size=5))
def test_a_batch_costs_its_chunks_and_one_load(model: CostModel, batch: list[Chunk]) -> None:
    alone_s = [model.batch_s([chunk]) for chunk in batch]
    assert model.batch_s(batch) == pytest.approx(sum(alone_s) - (len(batch) - 1) * model.load_s)  # Eq. 3


@given(models, st.lists(st.lists(chunks, max_size=5), min_size=1, max_size=5))
def test_many_batches_cost_what_each_costs(model: CostModel, many: list[list[Chunk]]) -> None:
    assert model.batches_s(many) == pytest.approx([model.batch_s(batch) for batch in many])


@given(st.integers(0, 4000), st.integers(2, 2000), st.data())
def test_where_masked_pairs_are_skipped_a_cut_costs_a_chunk_and_reading_what_is_before_it(
    prefix: int, num: int, data: st.DataObject
) -> None:
    model = replace(TRUE, self_attention_s=TRUE.prefix_attention_s / 2)
    at = data.draw(st.integers(1, num - 1))
    more_s = model.tokens_s(prefix, at) + model.tokens_s(prefix + at, num - at) - model.tokens_s(prefix, num)
    assert more_s == pytest.approx(model.other_s + model.kv_read_s * (prefix + at))


def test_a_fit_finds_the_model_behind_the_samples() -> None:
    assert close(fit(samples(40)), TRUE, 1e-6)


@pytest.mark.parametrize("tile_tokens", TILES)
def test_a_fit_finds_the_tile_behind_the_samples(tile_tokens: int) -> None:
    true = replace(TRUE, tile_tokens=tile_tokens)
    found = fit(samples(40, true))
    assert found.tile_tokens == tile_tokens and close(found, true, 1e-6)


def test_noise_is_not_taken_for_tiles() -> None:
    """Fixed samples: of many more, noise looks like tiles in one of thousands."""
    assert [seed for seed in range(200) if fit(samples(60, noise=0.1, seed=seed)).tile_tokens != 1] == []


@given(st.integers(1, 2000), st.sampled_from(TILES))
def test_the_last_tile_is_paid_whole_but_by_a_decode(num_tokens: int, tile_tokens: int) -> None:
    paid = tiled(num_tokens, tile_tokens)
    assert num_tokens <= paid < num_tokens + tile_tokens
    assert paid == num_tokens if num_tokens == 1 else paid % tile_tokens == 0


@given(models, st.integers(0, 4000), st.integers(1, 2000))
def test_a_token_more_never_costs_less(model: CostModel, prefix: int, num: int) -> None:
    assert model.tokens_s(prefix, num) <= model.tokens_s(prefix, num + 1)
    assert model.tokens_s(prefix, num) <= model.tokens_s(prefix + 1, num)


def test_what_is_seen_while_serving_is_tiled_as_well() -> None:
    true = replace(TRUE, tile_tokens=64)
    online = OnlineFit(replace(true, prefix_attention_s=2 * true.prefix_attention_s))
    for sample in samples(400, true):
        online.observe(sample.chunks, sample.seconds)
    assert online.model().tile_tokens == 64
    assert relative_errors(online.model(), samples(60, true, seed=3)).mean() < 0.02


def test_a_fit_of_noisy_samples_predicts_others() -> None:
    model = fit(samples(200, noise=0.1))
    assert relative_errors(model, samples(100, seed=2)).mean() < 0.02


@given(st.integers(0, 10_000), st.sets(st.sampled_from(TERMS[:-1])))
def test_no_coefficient_is_negative_and_none_near_is_better(seed: int, absent: set[str]) -> None:
    true = replace(TRUE, **dict.fromkeys(absent, 0.0))
    noisy = samples(30, true, noise=0.4, seed=seed)
    model = fit(noisy)
    least = squared_error(model, noisy)
    for term, factor in product(TERMS, (0.99, 1.01)):
        value = getattr(model, term)
        assert value >= 0
        moved = replace(model, **{term: value * factor if value else getattr(TRUE, term) * 1e-3})
        assert squared_error(moved, noisy) >= least * (1 - 1e-9)


def test_small_batches_count_as_much_as_large_ones() -> None:
    large = samples(60)
    tiny = [Sample(chunks=(Chunk(prefix_tokens=p, num_tokens=1),), seconds=5e-3) for p in range(10, 1000, 30)]
    assert relative_errors(fit(large + tiny), tiny).mean() < 0.1


def test_a_gpu_is_fitted_as_well() -> None:
    """Steps of Llama-3-8B on one H100, composed of kernels that aiconfigurator (Apache-2.0) measured with vLLM.

    Its tables have no prefill after a prefix: there the time is the prompt's and its share of attention.
    """
    with (Path(__file__).parent / "data" / "h100_llama3_8b_steps.csv").open(encoding="utf-8") as file:
        rows = [(int(r["requests"]), int(r["prefix_tokens"]), int(r["num_tokens"]), r) for r in csv.DictReader(file)]
    steps = [
        Sample(chunks=(Chunk(prefix_tokens=prefix, num_tokens=num),) * count, seconds=float(row["step_ms"]) / 1e3)
        for count, prefix, num, row in rows
    ]
    random.Random(1).shuffle(steps)
    fitted, tested = steps[:70], steps[70:]
    errors, tokens_only = relative_errors(fit(fitted), tested), relative_errors(fit_token_count(fitted), tested)
    assert errors.mean() < 0.1 < 0.2 < tokens_only.mean()


def test_without_attention_a_model_misses_what_attention_costs() -> None:
    fitted, tested = samples(100), samples(50, seed=2)
    tokens_only = fit_token_count(fitted)
    assert tokens_only.prefix_attention_s == tokens_only.self_attention_s == tokens_only.kv_read_s == 0
    assert relative_errors(tokens_only, tested).mean() > 0.1
    assert relative_errors(fit(fitted), tested).mean() < 1e-6


@pytest.mark.parametrize(
    ("given_", "word"),
    [
        (samples(MIN_SAMPLES - 1), "at least"),
        (samples(3) * MIN_SAMPLES, "alike"),
        ([Sample(chunks=(Chunk(prefix_tokens=0, num_tokens=n),), seconds=1.0) for n in range(1, 40)], "alike"),
        ([*samples(30), Sample(chunks=(Chunk(prefix_tokens=0, num_tokens=1),), seconds=0.0)], "no time"),
        ([*samples(30), Sample(chunks=(Chunk(prefix_tokens=0, num_tokens=1),), seconds=float("nan"))], "no time"),
    ],
)
def test_samples_that_tell_too_little_are_refused(given_: list[Sample], word: str) -> None:
    with pytest.raises(PlanError, match=word):
        fit(given_)


def test_a_model_that_is_right_stays() -> None:
    online = OnlineFit(TRUE)
    for sample in samples(300):
        online.observe(sample.chunks, sample.seconds)
    assert close(online.model(), TRUE, 1e-6)


def test_a_model_knows_a_step_at_once_while_few_were_seen_and_soon_when_many_were() -> None:
    online, known = OnlineFit(TRUE), TRUE
    unknown = [0]
    for sample in samples(400, noise=0.3):
        online.observe(sample.chunks, sample.seconds)
        newest = online.model()
        unknown.append(unknown[-1] + 1 if newest is known else 0)
        known = newest
    assert not any(unknown[: 2 * REFIT_STEPS])
    assert max(unknown) == REFIT_STEPS - 1


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0])
def test_a_model_follows_a_machine_that_has_become_faster_or_slower(factor: float) -> None:
    online = OnlineFit(TRUE)
    now = replace(TRUE, **{term: getattr(TRUE, term) * factor for term in TERMS})
    for sample in samples(2000, now, noise=0.05):
        online.observe(sample.chunks, sample.seconds)
    assert relative_errors(online.model(), samples(50, now, seed=2)).mean() < 0.05


def test_an_outlier_counts_as_a_slow_step_however_long_it_took() -> None:
    batch = batches(1)[0]
    found = []
    for late_s in (OUTLIER * TRUE.batch_s(batch), 1e6):
        online = OnlineFit(TRUE)
        online.observe(batch, late_s)
        found.append(online.model())
    assert found[0] == found[1] != TRUE


def test_a_few_outliers_hardly_move_a_model() -> None:
    online = OnlineFit(TRUE)
    for index, sample in enumerate(samples(500)):
        online.observe(sample.chunks, 1e6 if index % 100 == 99 else sample.seconds)
    assert relative_errors(online.model(), samples(50, seed=2)).mean() < 0.1


def test_a_speed_seen_in_decodes_alone_holds_for_prefill() -> None:
    online = OnlineFit(TRUE)
    for sample in samples(1000):
        decodes = tuple(chunk for chunk in sample.chunks if chunk.num_tokens == 1)
        online.observe(decodes, 2 * TRUE.batch_s(decodes))
    twice = samples(60, replace(TRUE, **{term: 2 * getattr(TRUE, term) for term in TERMS}), seed=2)
    assert relative_errors(online.model(), twice).mean() < 0.05


def test_what_is_not_seen_for_long_is_still_believed() -> None:
    online = OnlineFit(TRUE)
    for sample in samples(6000, noise=0.05):
        decodes = tuple(chunk for chunk in sample.chunks if chunk.num_tokens == 1)
        if decodes:
            online.observe(decodes, TRUE.batch_s(decodes) * sample.seconds / TRUE.batch_s(sample.chunks))
    prefill = [s for s in samples(60, seed=2) if all(chunk.num_tokens > 1 for chunk in s.chunks)]
    assert prefill and relative_errors(online.model(), prefill).mean() < 0.1


@given(st.lists(st.tuples(chunks, st.floats(1e-6, 1e6)), min_size=1, max_size=30))
def test_whatever_is_observed_no_coefficient_is_negative(seen: list[tuple[Chunk, float]]) -> None:
    online = OnlineFit(TRUE)
    for chunk, seconds in seen:
        online.observe((chunk,), seconds)
    values = np.array([getattr(online.model(), term) for term in TERMS])
    assert np.isfinite(values).all() and (values >= 0).all()
