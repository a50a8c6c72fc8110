"""How long a step takes, in the terms that the judge predicts with: linear, so that sums over many steps fit it too.

    step  =  load_s  +  token_s * tokens  +  extra_s * max(0, tokens - KNOT_TOKENS)  +  seq_s * sequences
             +  context_s * context  +  pair_s * pairs

A GPU reads its weights once for each step; up to some hundred tokens computing hides behind that, and beyond them each
token costs. `extra_s` is that difference; on a CPU it is about 0. `planners.cost_model` is finer, for microbatches.
"""

from dataclasses import dataclass, fields
from operator import attrgetter

STEP_TOKENS = 2048
"""New tokens of a full step, as vLLM's default is (`max_num_batched_tokens`)."""

KNOT_TOKENS = 256
"""New tokens of a step beyond which each costs `extra_s` more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of one step of the whole model in one shape. A pipeline's idle stages are part of it."""

    load_s: float  # a step is there at all: weights are read, kernels launched
    token_s: float  # a new token
    extra_s: float  # a new token beyond `KNOT_TOKENS`, more
    seq_s: float  # a sequence in the step
    context_s: float  # a token of KV that is read
    pair_s: float  # a new token of a prompt and one that it attends to: chunk * (chunk + 2 * prefix)

    @property
    def terms(self) -> tuple[float, ...]:
        """The coefficients, in the order of `TERMS`."""
        found: tuple[float, ...] = _TERMS(self)
        return found

    def step_s(self, tokens: float, seqs: float, context: float, pairs: float = 0.0) -> float:
        """Seconds of one step."""
        extra = max(0.0, tokens - KNOT_TOKENS)
        linear_s = self.load_s + self.token_s * tokens + self.extra_s * extra
        return linear_s + self.seq_s * seqs + self.context_s * context + self.pair_s * pairs


NOMINAL = StepCost(load_s=0.02, token_s=5e-5, extra_s=6e-5, seq_s=5e-5, context_s=1.3e-7, pair_s=2.7e-9)
"""Of a 14B model on a fast GPU. Its proportions stand for those of others until they were profiled or measured."""

TERMS = tuple(f.name for f in fields(StepCost))
_TERMS = attrgetter(*TERMS)


@dataclass(slots=True)
class StepTotals:
    """What a lane's steps computed and took, added up: the totals of `InstanceStats` that a `StepCost` is fitted to."""

    steps: int = 0
    us: float = 0.0
    tokens: int = 0
    extra: int = 0
    seqs: int = 0
    context: int = 0
    pairs: int = 0

    def add(self, seconds: float, tokens: int, seqs: int, context: int, pairs: int = 0, num_steps: int = 1) -> None:
        """Counts `num_steps` equal steps that took `seconds` together; `context` is of all of them, the rest of one."""
        self.steps += num_steps
        self.us += seconds * 1e6
        self.tokens += num_steps * tokens
        self.extra += num_steps * max(0, tokens - KNOT_TOKENS)
        self.seqs += num_steps * seqs
        self.context += context
        self.pairs += num_steps * pairs

    def named(self) -> dict[str, int]:
        """By their names in `InstanceStats`."""
        return {
            "total_costed_steps": self.steps,
            "total_step_us": int(self.us),
            "total_step_tokens": self.tokens,
            "total_step_extra_tokens": self.extra,
            "total_step_seqs": self.seqs,
            "total_step_context": self.context,
            "total_step_pairs": self.pairs,
        }
