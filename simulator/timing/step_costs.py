"""What the judge is told that steps cost in each shape: the `StepCost` that comes nearest to the step times."""

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.step_fit import PIPELINE_BUBBLE, features_of, fit_steps
from pengserve.planners.types.layout import GroupKind, degree_of, tensor_degree_of
from pengserve.planners.types.step_cost import StepCost
from pengserve.simulator.timing.cost_model_times import sampled_batches
from pengserve.simulator.timing.steps import Batch, ModelTimes, StepTimes


def step_costs(
    times: Callable[[int], ModelTimes], shapes: Sequence[str], max_batched_tokens: int, max_num_seqs: int, max_len: int
) -> Mapping[str, StepCost]:
    """Of dp and of each of `shapes`, on batches within these limits. Of a pipeline: what all of its stages take."""
    batches = list(sampled_batches(random.Random(0), max_batched_tokens, max_num_seqs, max_len))
    features, found = [_features(batch) for batch in batches], {}
    for shape in (GroupKind.DP.value, *shapes):
        whole = times(tensor_degree_of(shape))
        if shape.startswith(GroupKind.PP):
            num_stages = degree_of(shape)
            stage = whole.stage(num_stages)
            found[shape] = fit_steps(features, _seconds(stage, batches) * num_stages / (1.0 - PIPELINE_BUBBLE))
        else:
            found[shape] = fit_steps(features, _seconds(whole, batches))
    return found


def _seconds(times: StepTimes, batches: Sequence[Batch]) -> NDArray[np.float64]:
    return np.array([times.step_s(batch) for batch in batches])


def _features(batch: Batch) -> tuple[float, ...]:
    return features_of(batch.num_decodes, batch.context_tokens, batch.prefills)
