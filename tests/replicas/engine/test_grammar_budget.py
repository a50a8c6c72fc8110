"""Laws of the budget: a costly grammar is used up soon and costs nothing more; an ordinary one never is."""

from typing import Any
from weakref import WeakSet

import pytest

pytest.importorskip("vllm")
from pengserve.replicas.engine.grammar_budget import BURST_S, LEAST_S, BudgetedGrammar
from pengserve.replicas.engine.vllm_seam import StructuredOutputGrammar


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
