"""Laws of the budget: a costly grammar is used up soon and costs nothing more; an ordinary one never is."""

import time
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest

pytest.importorskip("vllm")
import xgrammar
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from pengserve.replicas.engine.scheduling.grammar_budget import BURST_S, LEAST_S, BudgetedGrammar, bound_grammars
from pengserve.replicas.engine.vllm_seam import StructuredOutputGrammar
from tests.support.speed import slowness


class Clocked(StructuredOutputGrammar):
    """A grammar that takes `cost_s` of processor time for each call."""

    def __init__(self, cost_s: float) -> None:
        self.cost_s, self.spent_s, self.now_s = cost_s, 0.0, 0.0

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        self._work()
        return tokens

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        self._work()

    def rollback(self, num_tokens: int) -> None: ...

    def is_terminated(self) -> bool:
        return False

    def reset(self) -> None: ...

    def _work(self) -> None:
        self.spent_s += self.cost_s
        self.now_s += self.cost_s


class Row:
    """A row of a mask."""

    def __init__(self) -> None:
        self.filled: list[int] = []

    def fill_(self, value: int) -> None:
        self.filled.append(value)


class Steps:
    """Steps of `base_s` with one token for each of the grammars."""

    def __init__(self, base_s: float, costs_s: list[float]) -> None:
        self.base_s, self.masks = base_s, [Row() for _ in costs_s]
        self.inner = [Clocked(cost_s) for cost_s in costs_s]
        alive: WeakSet[BudgetedGrammar] = WeakSet()
        self.now_s = 0.0
        self.grammars = [
            BudgetedGrammar(each, alive, cpu_s=lambda each=each: each.spent_s, now_s=lambda: self.now_s)  # type: ignore[misc]
            for each in self.inner
        ]

    def run(self, count: int) -> list[bool]:
        """Whether each grammar still accepts tokens after so many steps."""
        accepted = [True] * len(self.grammars)
        for _ in range(count):
            before_s = sum(each.spent_s for each in self.inner)
            for index, grammar in enumerate(self.grammars):
                grammar.fill_bitmask(self.masks, index)
            self.now_s += self.base_s + sum(each.spent_s for each in self.inner) - before_s
            accepted = [grammar.accept_tokens("r", [1]) for grammar in self.grammars]
        return accepted


@pytest.mark.parametrize("cost_s", [0.3, 1.0, 30.0])
def test_a_grammar_that_stalls_a_step_is_used_up_within_two(cost_s: float) -> None:
    steps = Steps(0.01, [cost_s, 0.0001])
    assert steps.run(2) == [False, True]
    spent_s = steps.inner[0].spent_s
    assert spent_s <= 2 * cost_s
    assert steps.run(100) == [False, True]
    assert steps.inner[0].spent_s == spent_s, "it costs nothing any more"
    assert steps.masks[0].filled == [-1] * 100 or steps.masks[0].filled == [-1] * 101
    assert steps.grammars[0].validate_tokens([1, 2]) == []


@pytest.mark.parametrize(("base_s", "num", "cost_s"), [(0.005, 64, 0.0003), (0.02, 16, 0.0009), (2.0, 32, 0.008)])
def test_ordinary_grammars_are_never_used_up(base_s: float, num: int, cost_s: float) -> None:
    assert all(Steps(base_s, [cost_s] * num).run(2000))


@pytest.mark.parametrize("num", [1, 4, 16])
def test_grammars_together_make_steps_a_third_longer_at_most(num: int) -> None:
    steps = Steps(0.01, [0.025 / num + 2 * LEAST_S] * num)
    steps.run(2000)
    grammars_s = sum(each.spent_s for each in steps.inner)
    assert grammars_s <= num * (BURST_S + 2000 * LEAST_S) + 2000 * 0.01 * 0.35


def test_a_burst_is_allowed_once_and_grows_back() -> None:
    steps = Steps(0.01, [0.0001])
    for _ in range(3):
        steps.inner[0].cost_s = BURST_S * 0.9
        assert steps.run(1) == [True]
        steps.inner[0].cost_s = 0.0001
        assert steps.run(100) == [True]


def test_a_grammar_that_ended_no_longer_counts() -> None:
    steps = Steps(0.1, [0.0001] * 50)
    alive = steps.grammars[0]._alive
    assert len(alive) == 50
    del steps.grammars[1:]
    assert len(alive) == 1


def real_grammar(ebnf: str) -> BudgetedGrammar:
    """A grammar of xgrammar's over single characters, as an engine makes it."""
    vocabulary = [chr(code) for code in range(97, 123)] + ["</s>"]
    info = xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[len(vocabulary) - 1])
    compiled = xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(ebnf)
    made = XgrammarGrammar(matcher=xgrammar.GrammarMatcher(compiled), vocab_size=len(vocabulary), ctx=compiled)
    manager = SimpleNamespace(_create_grammar=lambda request: made)
    bound_grammars(manager)
    grammar: BudgetedGrammar = manager._create_grammar(None)
    return grammar


def accepted_tokens(grammar: BudgetedGrammar, most: int) -> int:
    """How many times the grammar takes an `a`."""
    mask = xgrammar.allocate_token_bitmask(1, 27)
    for count in range(most):
        grammar.fill_bitmask(mask, 0)
        if not grammar.accept_tokens("r", [0]):
            return count
    return most


@pytest.mark.slow
def test_an_ambiguous_grammar_of_xgrammar_is_used_up_and_a_plain_one_is_not() -> None:
    ambiguous = real_grammar('root ::= a\na ::= a a | a b | b a | ""\nb ::= "x" b | a | "a"')
    start_s = time.thread_time()
    assert accepted_tokens(ambiguous, 600) < 600
    assert ambiguous.is_used_up
    assert time.thread_time() - start_s < 5.0 * slowness(), "600 tokens would take minutes"
    plain = real_grammar("root ::= [a-z]{1,900}")
    assert accepted_tokens(plain, 600) == 600
    assert not plain.is_used_up
