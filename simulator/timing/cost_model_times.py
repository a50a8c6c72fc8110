"""Steps priced by KunServe's cost model (section 4.3, Eq. 1-3), as `pengserve profile` fits it; and the way back."""

import random
from collections.abc import Iterator

import numpy as np

from pengserve.planners.cost_model import Chunk, CostModel, Sample, fit, relative_errors
from pengserve.simulator.timing.ramp import StepRamp
from pengserve.simulator.timing.steps import Batch, StepTimes

NUM_BATCHES = 240
MAX_PROMPTS = 4  # of one sampled batch
MIN_TOKENS = 16  # of a sampled context or prefill chunk


class CostModelTimes:
    """`StepTimes` of a cost model. What the host did while it was fitted is in it."""

    def __init__(self, model: CostModel, *, host_s: float = 0.0, share: float = 1.0) -> None:
        """`host_s`: what of `model.load_s` is no work of layers, and whole in every stage. `share`: of the layers."""
        self._model, self._host_s, self._share = model, host_s, share

    def step_s(self, batch: Batch) -> float:
        """Seconds of one step."""
        prefill_s = sum(self._model.chunk_s(chunk) for chunk in batch.prefills)
        return self._ramp(batch).first_s + self._share * prefill_s

    def decodes_s(self, batch: Batch, num_steps: int) -> float:
        """Seconds of so many steps of the same decodes, each with one token more."""
        assert not batch.prefills, "steps in a row are of decodes alone"
        return self._ramp(batch).sum_s(num_steps)

    def steps_within(self, batch: Batch, seconds: float) -> int:
        """How many of those end within `seconds`."""
        assert not batch.prefills, "steps in a row are of decodes alone"
        return self._ramp(batch).steps_within(seconds)

    def stage(self, num_stages: int) -> "CostModelTimes":
        """One of so many stages."""
        return CostModelTimes(self._model, host_s=self._host_s, share=self._share / num_stages)

    def _ramp(self, batch: Batch) -> StepRamp:
        """Of the decodes: each is a chunk of one token after all of its context but that one."""
        model, num = self._model, batch.num_decodes
        per_prefix_s = model.prefix_attention_s + model.kv_read_s
        decodes_s = per_prefix_s * (batch.context_tokens - num) + num * model.tokens_s(0, 1)
        layers_s = model.load_s - self._host_s + decodes_s
        return StepRamp(self._host_s + self._share * layers_s, self._share * per_prefix_s * num)


def fit_cost_model(
    times: StepTimes, *, max_batched_tokens: int, max_num_seqs: int, max_model_len: int, seed: int = 0
) -> tuple[CostModel, float]:
    """The cost model that comes nearest to `times` on batches within these limits, and its mean relative error there.

    Production planners price with it; they know no other. Lengths are spread evenly over their logarithm.
    """
    batches = list(_sampled(random.Random(seed), max_batched_tokens, max_num_seqs, max_model_len))
    samples = [Sample(chunks=chunks, seconds=times.step_s(_batch(chunks))) for chunks in batches]
    model = fit(samples)
    return model, float(np.mean(relative_errors(model, samples)))


def sampled_batches(source: random.Random, max_tokens: int, max_seqs: int, max_len: int) -> Iterator[Batch]:
    """Batches of decodes, prefill and both within these limits; lengths are spread evenly over their logarithm."""
    return map(_batch, _sampled(source, max_tokens, max_seqs, max_len))


def _batch(chunks: tuple[Chunk, ...]) -> Batch:
    decodes = [chunk for chunk in chunks if chunk.num_tokens == 1]
    prefills = tuple(chunk for chunk in chunks if chunk.num_tokens > 1)
    return Batch(len(decodes), sum(chunk.prefix_tokens + 1 for chunk in decodes), prefills)


def _sampled(source: random.Random, max_tokens: int, max_seqs: int, max_len: int) -> Iterator[tuple[Chunk, ...]]:
    """Decodes, prefill and both, in turn."""
    for index in range(NUM_BATCHES):
        chunks: list[Chunk] = []
        if index % 3 != 1:
            longest = _spread(source, MIN_TOKENS, max_len - 1)
            num_decodes = _spread(source, 1, max(1, min(max_seqs, max_tokens - MIN_TOKENS)))
            chunks += [Chunk(prefix_tokens=_spread(source, 1, longest), num_tokens=1) for _ in range(num_decodes)]
        if index % 3 != 0:
            room = min(max_tokens - len(chunks), max_len)
            for _ in range(source.randint(1, MAX_PROMPTS)):
                num = _spread(source, 2, room // MAX_PROMPTS if room >= 2 * MAX_PROMPTS else 2)
                prefix = _spread(source, 1, max_len - num) if source.random() < 0.5 else 0
                chunks.append(Chunk(prefix_tokens=prefix, num_tokens=num))
        yield tuple(chunks)


def _spread(source: random.Random, least: int, most: int) -> int:
    """A whole number between the two, evenly over its logarithm."""
    return max(least, min(most, round(least * (most / least) ** source.random()))) if most > least else least
