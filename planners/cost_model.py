"""How long a batch takes (KunServe section 4.3, Eq. 1-3), fitted to steps that were timed.

    chunk  =  prefix_attention_s * prefix * tiled(num)  +  self_attention_s * num^2  +  ffn_s * num  +  other_s  Eq. 1
              +  kv_read_s * prefix
    batch  =  load_s  +  the sum of its chunks                                                                Eq. 2-3

`kv_read_s` is not in the paper, whose figures are of prefill. A chunk reads the KV of its prefix once, for however
many new tokens; where there is but one, reading takes most of its attention: on a CPU a decode costs ten times what
`prefix_attention_s` says. Nor are tiles: kernels compute attention for so many new tokens at once, full or not, so
that 40 tokens after a long prefix cost what 64 do (vLLM makes tiles for CPUs as large as a core's cache). The paper
gives every chunk its own loading of the weights and then takes all but one off again; here it is one term. Fits weigh
relative errors: a decode step of 5 ms counts as much as a prefill of a second.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.types.errors import PlanError

Floats = NDArray[np.float64]

TERMS = ("prefix_attention_s", "self_attention_s", "kv_read_s", "ffn_s", "other_s", "load_s")  # as in `_features`
WITHOUT_ATTENTION = ("ffn_s", "other_s", "load_s")
TILES = (1, 8, 16, 32, 64, 128)  # tokens
TILE_GAIN = 0.8  # tiles are believed in where the squared error with them is no more than so much of that without
MIN_SAMPLES = 2 * len(TERMS)
MAX_CONDITION = 1e5  # of the samples' features, each of size 1; above it two terms look the same
REFIT_STEPS = 8  # once many steps were seen the model is solved anew after so many; it forgets over hundreds
OUTLIER = 3.0  # a step that took more than so many times its prediction met something else, and is clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New tokens of one request in one step, after those whose KV is there. A decode is a chunk of one token."""

    prefix_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A batch that was run, and how long it took."""

    chunks: tuple[Chunk, ...]
    seconds: float
    host_s: float = 0.0  # of them: what is no work of the model's layers, and whole in every stage; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step of the whole model; a stage of a pipeline has its share of them. No coefficient is below 0."""

    prefix_attention_s: float  # a new token attends to a token of the prefix
    self_attention_s: float  # a new token attends to a token of its own chunk, masked pairs counted as well
    kv_read_s: float  # a chunk reads the KV of a token of its prefix
    ffn_s: float  # a new token passes the linear layers
    other_s: float  # a chunk is there at all: tables, sampling
    load_s: float  # a batch is there at all: weights are loaded once, kernels launched
    tile_tokens: int = 1  # attention to a prefix takes so many new tokens at once, but for one token alone

    def chunk_s(self, chunk: Chunk) -> float:
        """Seconds that `chunk` adds to a batch (Eq. 1)."""
        return self.tokens_s(chunk.prefix_tokens, chunk.num_tokens)

    def tokens_s(self, prefix_tokens: int, num_tokens: int) -> float:
        """`chunk_s` of so many tokens, for callers that price many."""
        prefix_s = (self.prefix_attention_s * tiled(num_tokens, self.tile_tokens) + self.kv_read_s) * prefix_tokens
        return prefix_s + (self.self_attention_s * num_tokens + self.ffn_s) * num_tokens + self.other_s

    def batch_s(self, chunks: Iterable[Chunk]) -> float:
        """Seconds of a batch (Eq. 2-3)."""
        return self.load_s + sum(self.chunk_s(chunk) for chunk in chunks)

    def batches_s(self, batches: Iterable[Sequence[Chunk]]) -> Floats:
        """`batch_s` of many batches at once."""
        seconds: Floats = _matrix(batches, self.tile_tokens) @ _coefficients(self)
        return seconds


def tiled(num_tokens: int, tile_tokens: int) -> int:
    """New tokens of a chunk, with those that its last tile lacks; a decode is computed in another way, and has none."""
    return num_tokens if num_tokens == 1 else -(-num_tokens // tile_tokens) * tile_tokens


def fit(samples: Sequence[Sample]) -> CostModel:
    """The model with the least mean squared relative error on `samples`; of all `TILES`, if one explains them better.

    Raises:
        PlanError: the samples are too few, or too much alike, to tell the terms apart.
    """
    return _fit(samples, TERMS, TILES)


def fit_token_count(samples: Sequence[Sample]) -> CostModel:
    """The baseline: the same, but attention costs nothing, so that only tokens and requests count.

    Raises:
        PlanError: as `fit`.
    """
    return _fit(samples, WITHOUT_ATTENTION, TILES[:1])


def relative_errors(model: CostModel, samples: Sequence[Sample]) -> Floats:
    """|predicted - measured| / measured, by sample."""
    measured_s = np.array([sample.seconds for sample in samples])
    errors: Floats = np.abs(model.batches_s([sample.chunks for sample in samples]) / measured_s - 1.0)
    return errors


class OnlineFit:
    """Keeps a model right while it serves: recursive least squares that forget. Its memory does not grow.

    Where nothing was seen lately, the first model is believed, at the speed that the machine has now. Every step is
    weighed by what the first model says it takes, so that steps of all times count alike. A step is known by the model
    at once while few were seen, and later after `REFIT_STEPS` more at the latest.
    """

    def __init__(self, model: CostModel, *, memory_steps: float = 500.0, belief_steps: float = 8.0) -> None:
        """`memory_steps`: a step's weight falls to 1/e within so many. `belief_steps`: weight of the first model."""
        self._first, self._keep, self._model = model, 1.0 - 1.0 / memory_steps, model
        rows = _matrix(_PROBES, model.tile_tokens)
        rows *= np.sqrt(belief_steps / len(rows)) / model.batches_s(_PROBES)[:, None]
        self._belief: Floats = rows.T @ rows
        self._coefficients = _coefficients(model)
        self._gram = np.zeros_like(self._belief)
        self._moment = np.zeros_like(self._coefficients)
        self._num_seen = self._num_unsolved = 0  # steps: all, and those that the model does not know yet

    def observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Takes one step into account. What took `OUTLIER` times its prediction or more counts as that."""
        seconds = min(seconds, OUTLIER * self.model().batch_s(chunks))
        first_s = self._first.batch_s(chunks)
        row = _features(chunks, self._first.tile_tokens) / first_s
        self._gram = self._keep * self._gram + np.outer(row, row)
        self._moment = self._keep * self._moment + row * (seconds / first_s)
        self._num_seen += 1
        self._num_unsolved += 1

    def model(self) -> CostModel:
        """The model as it is now."""
        if self._num_unsolved and self._num_unsolved >= min(REFIT_STEPS, self._num_seen // REFIT_STEPS):
            first, gram, moment = self._coefficients, self._belief + self._gram, self._belief @ self._coefficients
            speed = first @ (moment + self._moment) / (first @ gram @ first)
            solved = _solve(gram, speed * moment + self._moment, TERMS, self._model)
            self._model = replace(solved, tile_tokens=self._first.tile_tokens)
            self._num_unsolved = 0
        return self._model


# Batches that tell all terms apart, priced by the first model: what `OnlineFit` believes before it has seen anything.
_PROBES: tuple[tuple[Chunk, ...], ...] = tuple(
    (Chunk(prefix_tokens=prefix, num_tokens=num),) * count
    for prefix, num, count in (
        (64, 1, 1), (512, 1, 1), (512, 1, 8), (2048, 1, 8), (64, 1, 64), (1024, 1, 64),
        (0, 64, 1), (0, 512, 1), (0, 2048, 1), (1024, 256, 1), (4096, 512, 1), (0, 128, 8),
    )
)  # fmt: skip


def _fit(samples: Sequence[Sample], terms: Sequence[str], tiles: Sequence[int]) -> CostModel:
    if len(samples) < MIN_SAMPLES:
        raise PlanError(f"a cost model needs at least {MIN_SAMPLES} timed steps, not {len(samples)}: profile more")
    measured_s = np.array([sample.seconds for sample in samples])
    if not (np.isfinite(measured_s).all() and (measured_s > 0).all()):
        raise PlanError("a timed step took no time, or none that is a number: profile again")
    plain, *others = [_fit_tile(samples, terms, tile_tokens) for tile_tokens in tiles]
    if plain is None:
        raise PlanError("the timed steps are too much alike to tell a cost model's terms apart: profile more kinds")
    best = min((found for found in others if found is not None), key=lambda found: found[0], default=plain)
    return best[1] if best[0] <= TILE_GAIN * plain[0] else plain[1]


def _fit_tile(samples: Sequence[Sample], terms: Sequence[str], tile_tokens: int) -> tuple[float, CostModel] | None:
    """The least squared error with this tile, and its model; None where terms look the same."""
    rows = _matrix((sample.chunks for sample in samples), tile_tokens)
    rows /= np.array([sample.seconds for sample in samples])[:, None]
    chosen = rows[:, [TERMS.index(term) for term in terms]]
    sizes = np.linalg.norm(chosen, axis=0)
    if not sizes.all() or np.linalg.cond(chosen / sizes) > MAX_CONDITION:
        return None
    model = replace(_solve(chosen.T @ chosen, chosen.sum(axis=0), terms), tile_tokens=tile_tokens)
    return float(((rows @ _coefficients(model) - 1.0) ** 2).sum()), model


def _solve(gram: Floats, moment: Floats, terms: Sequence[str], guess: CostModel | None = None) -> CostModel:
    """Least squares from the normal equations of `terms`, with no coefficient below 0; the others are 0.

    The best solution has some support, and is the unconstrained one on it. With so few terms the supports are tried
    one by one, first that of `guess`, which is nearly always right.
    """
    scale = np.sqrt(np.diag(gram))
    gram, moment = gram / np.outer(scale, scale), moment / scale
    everything = range(len(terms))
    supports = chain.from_iterable(combinations(everything, size) for size in range(len(terms), 0, -1))
    best, least = np.zeros(len(terms)), 0.0
    for support in chain([_support(guess, terms)] if guess else [], supports):
        solution = np.zeros(len(terms))
        solution[list(support)] = np.linalg.solve(gram[np.ix_(support, support)], moment[list(support)])
        loss = -float(solution @ moment)  # squared error, less that of no model at all
        if solution.min() >= 0 and loss < least:
            best, least = solution, loss
            if (gram @ best - moment).min() > -1e-9:  # nothing gets better with more of any term
                break
    found = dict(zip(terms, (best / scale).tolist(), strict=True))
    return CostModel(**(dict.fromkeys(TERMS, 0.0) | found))


def _support(model: CostModel, terms: Sequence[str]) -> tuple[int, ...]:
    return tuple(index for index, term in enumerate(terms) if getattr(model, term) > 0)


def _coefficients(model: CostModel) -> Floats:
    return np.array([getattr(model, term) for term in TERMS])


def _features(chunks: Sequence[Chunk], tile_tokens: int) -> Floats:
    """What a batch has of each of `TERMS`."""
    prefix = sum(chunk.prefix_tokens * tiled(chunk.num_tokens, tile_tokens) for chunk in chunks)
    square = sum(chunk.num_tokens * chunk.num_tokens for chunk in chunks)
    read = sum(chunk.prefix_tokens for chunk in chunks)
    return np.array([prefix, square, read, sum(chunk.num_tokens for chunk in chunks), len(chunks), 1.0])


def _matrix(batches: Iterable[Sequence[Chunk]], tile_tokens: int) -> Floats:
    return np.stack([_features(chunks, tile_tokens) for chunks in batches])
