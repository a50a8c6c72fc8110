"""A `StepCost` for each shape from steps that were timed one by one.

An instance tells what its own idle profile found (`LaneInfo.step_cost`), the simulator what its machine would find.
What no profile can tell, such as what tensor-parallel members lose to each other, is learned from steps that were run
(`planners.judge.costs`).
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from pengserve.planners.columns import Floats
from pengserve.planners.cost_model import Chunk, Sample
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.step_cost import KNOT_TOKENS, TERMS, StepCost

PIPELINE_BUBBLE = 0.1  # of a pipeline's time, before any was measured


def fit_steps(features: Sequence[Sequence[float]], seconds: Floats) -> StepCost:
    """Least squares of relative errors; a term that would be negative is left out, the most negative one first.

    Args:
        features: `[step, term]`, in the order of `TERMS`.
        seconds: that each step took, above 0.
    """
    rows = np.array(features, dtype=np.float64) / seconds[:, None]
    used = [at for at in range(len(TERMS)) if rows[:, at].any()]  # no step is beyond the knot where budgets are small
    while True:
        scale = np.linalg.norm(rows[:, used], axis=0)
        found = np.linalg.lstsq(rows[:, used] / scale, np.ones(len(rows)), rcond=None)[0] / scale
        if found.min() >= 0:
            break
        del used[int(np.argmin(found * scale))]
    terms = dict.fromkeys(TERMS, 0.0) | {TERMS[at]: float(value) for at, value in zip(used, found, strict=True)}
    return StepCost(**terms)


def features_of(num_decodes: int, decode_context: int, prefills: Iterable[Chunk]) -> tuple[float, ...]:
    """One step in the order of `TERMS`. `decode_context`: tokens of KV that its decodes read."""
    chunks = tuple(prefills)
    tokens = num_decodes + sum(chunk.num_tokens for chunk in chunks)
    context = decode_context + sum(chunk.prefix_tokens + chunk.num_tokens for chunk in chunks)
    pairs = sum(chunk.num_tokens * (chunk.num_tokens + 2 * chunk.prefix_tokens) for chunk in chunks)
    return 1.0, tokens, max(0, tokens - KNOT_TOKENS), num_decodes + len(chunks), context, pairs


def pipeline_s(layers_s: Floats, host_s: Floats, num_stages: int) -> Floats:
    """What the stages of a pipeline take together for steps of so many seconds, idle or not.

    Each has its share of the layers, and all of `host_s`: what is no work of layers.
    """
    found: Floats = (layers_s + num_stages * host_s) / (1.0 - PIPELINE_BUBBLE)
    return found


def step_costs(samples: Sequence[Sample], max_stages: int) -> Mapping[str, StepCost]:
    """Of dp, and of pipelines of 2, 4, ... up to `max_stages` stages, from steps of dp that were timed."""
    features = [_features(sample) for sample in samples]
    seconds, host_s = np.array([s.seconds for s in samples]), np.array([s.host_s for s in samples])
    found = {GroupKind.DP.value: fit_steps(features, seconds)}
    for power in range(1, max_stages.bit_length()):
        stages_s = pipeline_s(seconds - host_s, host_s, 1 << power)
        found[f"{GroupKind.PP.value}{1 << power}"] = fit_steps(features, stages_s)
    return found


def _features(sample: Sample) -> tuple[float, ...]:
    decodes = [chunk for chunk in sample.chunks if chunk.num_tokens == 1]
    context = sum(chunk.prefix_tokens + 1 for chunk in decodes)
    return features_of(len(decodes), context, (chunk for chunk in sample.chunks if chunk.num_tokens > 1))
