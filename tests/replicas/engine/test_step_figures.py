"""What is learned from steps: the price of a step, of a token of KV, and of staging."""

import pytest

from pengserve.replicas.engine.placement.step_figures import StepFigures

STEP_S, CONTEXT_S, STAGED_S = 0.01, 2e-6, 0.004


def learned(contexts: list[int], *, staged: bool = False) -> StepFigures:
    figures = StepFigures(num_layers=4, block_size=16)
    for context in contexts:
        figures.learn(STEP_S + CONTEXT_S * context, context)
    if staged:
        for _ in contexts:
            figures.learn_staged(STAGED_S)
    return figures


def test_nothing_is_known_before_a_step() -> None:
    assert StepFigures(4, 16).machine(100, 1.0) is None


def test_where_context_has_varied_its_price_is_known() -> None:
    machine = learned(list(range(1000, 9000, 40))).machine(100, 7.0)
    assert machine is not None and (machine.num_cells, machine.cells_per_s) == (100, 7.0)
    assert machine.context_s == pytest.approx(CONTEXT_S, rel=0.1)
    assert machine.step_s == pytest.approx(STEP_S, rel=0.1)


def test_where_it_has_not_a_step_is_as_before() -> None:
    machine = learned([5000] * 50).machine(100, 7.0)
    assert machine is not None and machine.context_s == 0.0
    assert machine.step_s == pytest.approx(STEP_S + 5000 * CONTEXT_S)


def test_staged_steps_tell_what_staging_takes_and_nothing_else() -> None:
    plain, staged = (learned(list(range(1000, 9000, 40)), staged=s).machine(1, 1.0) for s in (False, True))
    assert plain is not None and staged is not None
    assert plain.staged_s == 0.0 and staged.staged_s == pytest.approx(STAGED_S, rel=0.2)
    assert (plain.step_s, plain.context_s) == (staged.step_s, staged.context_s)
