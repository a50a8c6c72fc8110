"""How many tokens running requests have generated, told by a few of them."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

NUM_AGES = 6
AGES = tuple(f"age_{place}" for place in range(1, NUM_AGES + 1))
"""Their names in `InstanceStats`."""


def sampled(running: Sequence[T]) -> list[T]:
    """`NUM_AGES` of what runs, evenly spaced in its order, which is about that of beginning; fewer than these come
    several times, and none where nothing runs.
    """
    count = len(running)
    return [running[(2 * place + 1) * count // (2 * NUM_AGES)] for place in range(NUM_AGES)] if count else []


def ages_told(running: Sequence[T], num_generated: Callable[[T], int]) -> dict[str, int]:
    """Tokens that those have which stand for all that runs, by names in `InstanceStats`."""
    return dict(zip(AGES, map(num_generated, sampled(running)), strict=False))
