"""Which short prompts a step reads before the rest of a long one, where all requests are of one band. Pure.

vLLM gives a step's tokens to prompts in the order in which they came. So a prompt of a hundred tokens that comes behind
one of twenty thousand waits until all of that is read: for a second or more. Here

    1. prompts of at most `1 / SHORT` of a step's tokens overtake where one is read that a step does not hold, and take
       at most half of what the step has for prompts. They are read whole, in the order in which they came
    2. of the longer ones that have begun the first has what is left. Another one has a part of it only if all of it
       fits; those that have not begun come behind the short ones, in the order in which they came
    3. no prompt overtakes where the blocks, or the places in the batch, would not do for it, for the longer ones that
       have begun and for the next: a prompt that could begin never waits for memory that was given to a later one

What the step computes of requests that decode comes before all prompts, wherever these are in the batch.

Bound: half of each step is left for the long prompts, so reading them takes at most twice as many steps.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

SHORT = 8


class Prompt(NamedTuple):
    """A request whose prompt is read, or could be begun in the next step."""

    request_id: str
    num_tokens: int  # that are not computed
    num_blocks: int  # that it needs beside those it has
    is_running: bool  # it has begun
    band: int = 0


class Overtaking(NamedTuple):
    """How the next step departs from the order of arrival."""

    first: tuple[str, ...] = ()  # prompts that begin before all others that wait
    max_chunk: int | None = None  # tokens of one prompt at most; None: as many as the step has
    passed: frozenset[str] = frozenset()  # prompts that have begun, and that it leaves out


IN_ORDER = Overtaking()


def is_short(num_tokens: int, step_tokens: int) -> bool:
    """Whether a prompt with so many tokens to read may overtake, where a step has at most `step_tokens`."""
    return num_tokens * SHORT <= step_tokens


def is_any_long(begun: Iterable[int], waiting: Iterable[int], step_tokens: int) -> bool:
    """Whether short prompts may overtake one that has begun, or one that waits; of each the tokens to read."""
    return any(not is_short(tokens, step_tokens) for tokens in begun) or any(tokens > step_tokens for tokens in waiting)


def plan_overtaking(
    prompts: Sequence[Prompt], num_decoding: int, budget: int, num_free: int, step_tokens: int | None = None
) -> Overtaking:
    """Shares a step out among prompts.

    Args:
        prompts: in the order in which the step would read them, those that have begun first. No more of those that
            wait than there are places in the batch.
        num_decoding: tokens that the step computes of requests that decode; each may take a block.
        budget: tokens that it computes at most.
        num_free: KV blocks that requests which wait may begin with.
        step_tokens: that any step computes at most, for a microbatch that has fewer; None: `budget`.
    """
    step_tokens, room = budget if step_tokens is None else step_tokens, max(1, budget - num_decoding)
    begun = [prompt for prompt in prompts if prompt.is_running]
    waiting = [prompt for prompt in prompts if not prompt.is_running]
    if not is_any_long([p.num_tokens for p in begun], [p.num_tokens for p in waiting], step_tokens):
        return IN_ORDER
    if sum([prompt.num_tokens for prompt in prompts]) <= room:
        return IN_ORDER
    if any(prompt.band != prompts[0].band for prompt in prompts):
        return IN_ORDER
    long_begun = [prompt for prompt in begun if not is_short(prompt.num_tokens, step_tokens)]
    next_long = next((prompt for prompt in waiting if not is_short(prompt.num_tokens, step_tokens)), None)
    num_free -= num_decoding + sum([prompt.num_blocks for prompt in begun])
    num_free -= next_long.num_blocks if next_long is not None else 0
    shorts = [prompt for prompt in prompts if is_short(prompt.num_tokens, step_tokens)]
    read = _read_whole(shorts, room // 2, num_free)
    left = room - sum([prompt.num_tokens for prompt in read])
    first = [prompt for prompt in read if not prompt.is_running]
    if next_long is None or not first or prompts.index(first[-1]) < prompts.index(next_long):
        first = []  # they are in their order anyway
    return Overtaking(
        first=tuple([prompt.request_id for prompt in first]),
        max_chunk=left if long_begun else None,
        passed=_too_long(long_begun, left) if read else frozenset(),
    )


def _read_whole(shorts: Sequence[Prompt], num_tokens: int, num_blocks: int) -> list[Prompt]:
    """The first ones that need no more tokens than that, and those of them that wait no more blocks."""
    read = []
    for prompt in shorts:
        num_tokens -= prompt.num_tokens
        num_blocks -= 0 if prompt.is_running else prompt.num_blocks
        if num_tokens < 0 or (num_blocks < 0 and not prompt.is_running):
            break
        read.append(prompt)
    return read


def _too_long(begun: Sequence[Prompt], num_tokens: int) -> frozenset[str]:
    """Of long prompts that have begun, all but the first and those that fit in what it leaves of so many tokens."""
    passed, left = set[str](), num_tokens - sum([prompt.num_tokens for prompt in begun[:1]])
    for prompt in begun[1:]:
        if prompt.num_tokens <= left:
            left -= prompt.num_tokens
        else:
            passed.add(prompt.request_id)
    return frozenset(passed)
