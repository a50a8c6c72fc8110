"""Fifty worlds, and laws of the world itself. `make world` runs thousands."""

import pytest

from tests.world.faults import Kind, draw
from tests.world.shrink import shrink
from tests.world.world import run

NUM_SEEDS = 50
SEEDS_A_TEST = 10


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_A_TEST))
def test_every_law_holds_whatever_goes_wrong(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        outcome = run(draw(seed))
        assert not outcome.broken, f"seed {seed} (python -m tests.world --seed {seed} shrinks it): {outcome.broken}"


def test_a_seed_is_one_world() -> None:
    assert [run(draw(7)) for _ in range(2)] == [run(draw(7))] * 2


def test_every_kind_of_fault_is_drawn() -> None:
    assert {fault.kind for seed in range(200) for fault in draw(seed).faults} == set(Kind)


def test_what_is_shrunk_fails_and_needs_each_of_its_parts() -> None:
    def fails(items: list[int]) -> bool:
        return {3, 17, 18} <= set(items)

    assert shrink(range(40), fails) == [3, 17, 18]
    assert shrink(range(40), lambda items: True) == []
