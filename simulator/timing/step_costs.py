"""What the judge is told that steps cost in each shape: the `StepCost` that comes nearest to the step times."""

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.types.layout import GroupKind, degree_of, tensor_degree_of
from pengserve.planners.types.step_cost import KNOT_TOKENS, TERMS, StepCost
from pengserve.simulator.timing.cost_model_times import sampled_batches
from pengserve.simulator.timing.steps import Batch, ModelTimes, StepTimes, prefill_tokens

PIPELINE_BUBBLE = 0.1  # of a pipeline's time, before any was measured


def step_costs(
    times: Callable[[int], ModelTimes], shapes: Sequence[str], max_batched_tokens: int, max_num_seqs: int, max_len: int
) -> Mapping[str, StepCost]:
    """Of dp and of each of `shapes`, on batches within these limits. Of a pipeline: what all of its stages take."""
    batches = list(sampled_batches(random.Random(0), max_batched_tokens, max_num_seqs, max_len))
    found = {}
    for shape in (GroupKind.DP.value, *shapes):
        whole = times(tensor_degree_of(shape))
        if shape.startswith(GroupKind.PP):
            num_stages = degree_of(shape)
            stage = whole.stage(num_stages)
            found[shape] = _fit(batches, _seconds(stage, batches) * num_stages / (1.0 - PIPELINE_BUBBLE))
        else:
            found[shape] = _fit(batches, _seconds(whole, batches))
    return found


def _seconds(times: StepTimes, batches: Sequence[Batch]) -> NDArray[np.float64]:
    return np.array([times.step_s(batch) for batch in batches])


def _fit(batches: Sequence[Batch], seconds: NDArray[np.float64]) -> StepCost:
    """Least squares of relative errors; a term that would be negative is left out, the most negative one first."""
    rows = np.array([_features(batch) for batch in batches]) / seconds[:, None]
    used = [at for at in range(len(TERMS)) if rows[:, at].any()]  # no step is beyond the knot where budgets are small
    while True:
        scale = np.linalg.norm(rows[:, used], axis=0)
        found = np.linalg.lstsq(rows[:, used] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if found.min() >= 0:
            break
        del used[int(np.argmin(found * scale))]
    terms = dict.fromkeys(TERMS, 0.0) | {TERMS[at]: float(value) for at, value in zip(used, found, strict=True)}
    return StepCost(**terms)


def _features(batch: Batch) -> tuple[float, ...]:
    tokens = batch.num_decodes + prefill_tokens(batch.prefills)
    context = batch.context_tokens + sum(chunk.prefix_tokens + chunk.num_tokens for chunk in batch.prefills)
    pairs = sum(chunk.num_tokens * (chunk.num_tokens + 2 * chunk.prefix_tokens) for chunk in batch.prefills)
    seqs = batch.num_decodes + len(batch.prefills)
    return 1.0, tokens, max(0, tokens - KNOT_TOKENS), seqs, context, pairs
