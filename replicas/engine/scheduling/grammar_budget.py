"""The time that the grammars of guided requests may take of an instance's steps.

A grammar such as `e ::= e e | e e e | "a"` costs 0.2 to 1 s for each token, and all requests of the batch wait for it.
Each grammar has a budget of processor time, of which each token gives it some more. One that is used up costs nothing
from then on, and its request is ended.

    allowance of a token = SHARE x time of the step / number of grammars, and at least LEAST_S
"""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakSet

from pengserve.replicas.engine.vllm_seam import StructuredOutputGrammar

BURST_S = 0.25  # what a grammar may take beyond its allowances
SHARE = 0.25  # of a step, for all grammars together: in the long run they make it a third longer
LEAST_S = 0.001  # for each grammar and token, however short steps are
NICENESS = 10  # of threads that compile: steps come first

T = TypeVar("T")
Clock = Callable[[], float]


class BudgetedGrammar(StructuredOutputGrammar):
    """A grammar of vLLM's with a budget.

    `cpu_s` tells the processor time of the calling thread, `now_s` the time on the wall.
    """

    def __init__(
        self,
        grammar: StructuredOutputGrammar,
        alive: "WeakSet[BudgetedGrammar]",
        cpu_s: Clock = time.thread_time,
        now_s: Clock = time.monotonic,
    ) -> None:
        self._grammar, self._alive, self._cpu_s, self._now_s = grammar, alive, cpu_s, now_s
        self._left_s, self._last_token_s = BURST_S, now_s()
        alive.add(self)

    @property
    def is_used_up(self) -> bool:
        """Whether the grammar took more than its budget; its request is to be ended."""
        return self._left_s < 0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """False where the grammar rejects them, or is used up."""
        now_s = self._now_s()
        allowance_s = max(LEAST_S, SHARE * (now_s - self._last_token_s) / max(1, len(self._alive)))
        if not self.is_used_up:
            self._left_s = min(BURST_S, self._left_s + allowance_s * len(tokens))
        self._last_token_s = now_s
        accepted: bool = self._spend(False, self._grammar.accept_tokens, request_id, tokens)
        return accepted and not self.is_used_up

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The tokens that the grammar would accept; none when it is used up."""
        return self._spend([], self._grammar.validate_tokens, tokens)

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Allows what the grammar allows; everything when it is used up, as the token is then rejected."""
        if self.is_used_up:
            bitmask[batch_index].fill_(-1)
        else:
            self._spend(None, self._grammar.fill_bitmask, bitmask, batch_index)

    def rollback(self, num_tokens: int) -> None:
        """Takes tokens back."""
        self._grammar.rollback(num_tokens)

    def is_terminated(self) -> bool:
        """Whether the text is complete."""
        return self._grammar.is_terminated()

    def reset(self) -> None:
        """Begins again. The budget stays as it is."""
        self._grammar.reset()

    def _spend(self, when_used_up: T, action: Callable[..., T], *arguments: Any) -> T:
        if self.is_used_up:
            return when_used_up
        start_s = self._cpu_s()
        result = action(*arguments)
        self._left_s -= self._cpu_s() - start_s
        return result


def bound_grammars(manager: Any) -> None:
    """Gives each grammar that `manager`, vLLM's StructuredOutputManager, makes from now on a budget.

    Threads that compile yield to the one that steps.
    """
    create: Callable[[Any], StructuredOutputGrammar] = manager._create_grammar
    alive: WeakSet[BudgetedGrammar] = WeakSet()
    manager._create_grammar = lambda request: BudgetedGrammar(create(request), alive)
    if hasattr(manager, "executor"):  # there is none without a tokenizer
        manager.executor.shutdown(wait=False)
        manager.executor = ThreadPoolExecutor(
            max_workers=max(1, (os.cpu_count() or 1) // 2), thread_name_prefix="grammar", initializer=_yield_to_steps
        )


def is_used_up(request: Any) -> bool:
    """Whether the grammar of this guided request took more than its budget."""
    grammar = request.structured_output_request.grammar
    return isinstance(grammar, BudgetedGrammar) and grammar.is_used_up


def _yield_to_steps() -> None:
    """Lowers the priority of this thread, and of those that a library starts in it; Linux has one for each thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
