"""Which prompts a step reads, and how much of them, where requests of several bands are served. Pure.

vLLM gives a step's tokens to the requests that run, in their order, then to those that wait. So a long prompt takes
all of a step, and an urgent one that comes meanwhile waits for that step and shares the next one. Here

    1. while a more urgent prompt is read, less urgent ones are passed over. Once in `TURN_STEPS` steps the one that was
       passed over most often has its turn: all others are passed over, the urgent ones too
    2. while more urgent requests come now and then, a step reads at most `1 / SHORT_STEP` of its tokens of less urgent
       prompts, or what it reads in `SHORT_S` if that is more: the next urgent one waits no longer than such a step
       takes. Each further cut costs a step in which the place that reads does not decode

The bands of tenants ahead of their shares lie between those of priorities (`planners/fairness.py`), so a flood's long
prompts hold up the flood. Where all requests are of one band nothing is passed over and no step is shortened.

Bound: each of n prompts that are passed over is read once in `n * TURN_STEPS` steps, also while urgent ones come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

TURN_STEPS = 8
SHORT_STEP = 8
SHORT_S = 0.05
MIN_TOKENS = 16  # of less urgent prompts in a short step


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request whose prompt is read, or could be begun in the next step."""

    request_id: str
    band: int
    num_tokens: int  # that are not computed
    num_passed: int = 0  # steps since it was last read in which it was passed over
    is_running: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """What the next step reads."""

    passed: frozenset[str] = frozenset()  # running requests that it leaves out
    max_tokens: int | None = None  # that it computes, with those that decode; None: as many as vLLM takes
    is_turn: bool = False  # it reads a less urgent prompt in place of more urgent ones


def plan_chunks(
    prompts: Sequence[Prompt],
    most_urgent: int,
    num_decoding: int,
    step_tokens: int,
    num_passing: int = 0,
    *,
    tokens_per_s: float = 0.0,
) -> Chunks:
    """Shares a step out among prompts.

    Args:
        most_urgent: the least band of the requests that came lately.
        num_decoding: tokens of requests that decode, in the next step.
        step_tokens: that vLLM computes in a step at most.
        num_passing: steps in a row, since the last turn, in which prompts were passed over.
        tokens_per_s: of prompts that a step reads; 0: not known.
    """
    if not prompts:
        return Chunks()
    first = min(prompt.band for prompt in prompts)
    behind = [prompt for prompt in prompts if prompt.band > first and prompt.is_running]
    urgent = sum(prompt.num_tokens for prompt in prompts if prompt.band == first)
    short = max(MIN_TOKENS, step_tokens // SHORT_STEP, min(step_tokens, int(SHORT_S * tokens_per_s)))
    if behind and num_passing >= TURN_STEPS - 1:
        turn = max(behind, key=lambda prompt: prompt.num_passed)
        others = frozenset(p.request_id for p in prompts if p.is_running and p is not turn)
        return Chunks(passed=others, max_tokens=min(step_tokens, num_decoding + short), is_turn=True)
    if first > most_urgent:
        urgent = min(urgent, short)
    elif all(prompt.band == first for prompt in prompts):
        return Chunks()
    passed = frozenset(prompt.request_id for prompt in behind)
    return Chunks(passed=passed, max_tokens=min(step_tokens, num_decoding + urgent))
