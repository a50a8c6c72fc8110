"""Laws of layers that are kept on the host: each full block of a request goes there once, and again where it is new."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from pengserve.replicas.engine.tiers.placed_layers import PlacedLayers

pytestmark = pytest.mark.slow

BLOCK_SIZE = 4


class World:
    """One request with blocks, and what the tiers were told."""

    def __init__(self) -> None:
        self.blocks, self.num_tokens, self.told = list[int](), 0, list[tuple[list[int], tuple[int, ...]]]()
        scheduler: Any = SimpleNamespace(
            knows=lambda name: True,
            request=lambda name: SimpleNamespace(num_computed_tokens=self.num_tokens),
            block_ids=lambda name: list(self.blocks),
            shared_blocks=lambda name: [],
        )
        tiers: Any = SimpleNamespace(
            num_layers=4,
            num_model_layers=4,
            block_size=BLOCK_SIZE,
            place=lambda blocks, layers: self.told.append((blocks, layers)),
            own=list,
        )
        self.layers = PlacedLayers(scheduler, tiers, lambda request: request.num_computed_tokens)

    def have(self, *blocks: int, num_tokens: int) -> list[tuple[list[int], tuple[int, ...]]]:
        """The request has these blocks now; what the tiers hear."""
        self.blocks, self.num_tokens = list(blocks), num_tokens
        self.told.clear()
        self.layers.renew()
        return self.told


def test_blocks_go_where_those_before_them_are_as_they_fill() -> None:
    world = World()
    world.have(5, 6, num_tokens=7)
    world.layers.say("a", [1, 3])
    assert world.told == [([5], (1, 3))]
    assert world.have(5, 6, num_tokens=7) == []
    assert world.have(5, 6, 7, num_tokens=9) == [([6], (1, 3))]


def test_kv_that_has_come_to_other_blocks_is_placed_anew() -> None:
    """As after a merge and a split, of which this lane saw nothing."""
    world = World()
    world.have(5, 6, num_tokens=8)
    world.layers.say("a", [1])
    assert world.have(15, 16, 17, num_tokens=12) == [([15, 16, 17], (1,))]
    assert world.have(15, num_tokens=4) == [([15], (1,))], "it was given up, and is computed again"
    assert world.have(15, 18, num_tokens=8) == [([18], (1,))]
