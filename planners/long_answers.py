"""Which long answer gives way where a prompt waits for memory, and when it goes on.

First come, first served, an answer of many thousand tokens keeps the memory of many prompts until it ends, and all that
wait for memory meanwhile are late. So where the next prompt has no memory to begin with, and some of the time to its
first token is gone, the longest answer gives its memory up. It waits behind all prompts, and its tokens are computed
again when it goes on: by then its client has more to read than most others have, and what it loses is little beside the
time that its answer takes.

    1. only for a prompt with an SLO for its first token: without one nothing is changed
    2. only an answer that frees much more than is missing, and that has no long prompt, which would be read again
    3. it goes on when no prompt waits and there is room for it and for what others will generate, or when it has waited
       for as long as its answer may take longer: it is before all prompts then
    4. none gives way more than some times, and none to a prompt of a less urgent band
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class GivingWay:
    """When answers give way, and go on."""

    gone: float = 0.1  # of the time to the prompt's first token, before any answer gives way to it
    min_tokens: int = 1000  # no answer with fewer gives way
    max_preemptions: int = 2  # nor one that was preempted more often
    worth: float = 2.0  # times the missing blocks, that it must hold
    again: float = 5.0  # times the tokens of its answer that are computed again at most, above 1: no long prompt is
    spare: float = 0.02  # share of all blocks that must stay free when it goes on
    wait_s: float = 0.007  # that it waits at most, for each token of its answer


DEFAULT = GivingWay()


class Answer(NamedTuple):
    """A running request that could give way."""

    num_tokens: int  # of its answer
    num_computed: int  # tokens whose KV it has, its prompt's among them
    num_blocks: int  # that it holds
    num_preemptions: int  # so far


def gives_way(answers: Sequence[Answer], num_missing: int, rules: GivingWay = DEFAULT) -> int | None:
    """The answer that gives way, by its index; None: none does.

    Args:
        num_missing: blocks that the next prompt needs beyond those that are free, more than 0.
    """
    able = [at for at, answer in enumerate(answers) if _is_able(answer, num_missing, rules)]
    return max(able, key=lambda at: answers[at].num_tokens, default=None)


def _is_able(answer: Answer, num_missing: int, rules: GivingWay) -> bool:
    if answer.num_tokens <= rules.min_tokens or answer.num_preemptions > rules.max_preemptions:
        return False
    if answer.num_computed > rules.again * answer.num_tokens:
        return False
    return answer.num_blocks >= rules.worth * num_missing


def goes_on(num_free: int, num_needed: int, num_blocks: int, rules: GivingWay = DEFAULT) -> bool:
    """Whether an answer that gave way goes on, where no prompt waits.

    Args:
        num_free: blocks that are free.
        num_needed: blocks that it begins with.
        num_blocks: all that there are.
    """
    return num_free > num_needed + rules.spare * num_blocks


def has_waited(num_tokens: int, waited_s: float, rules: GivingWay = DEFAULT) -> bool:
    """Whether an answer of so many tokens that gave way has waited for so long that it goes on before all prompts."""
    return waited_s > rules.wait_s * num_tokens
