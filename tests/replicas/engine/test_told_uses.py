"""A follower's tiers know which of its group's blocks are of no use any more: these are no reason to copy anything."""

import numpy as np
import pytest

pytest.importorskip("vllm")

from pengserve.replicas.engine.tiers.lane_tiers import ToldUses
from pengserve.replicas.kv.placement import Use
from pengserve.replicas.kv.table import CellTable
from tests.replicas.kv.tiered_world import BLOCK_SIZE, TieredWorld

LAYERS, DEVICE, HOST, RESERVED = 4, 40, 100, 8


class Follower:
    """Tiers whose blocks a group's lane has leased: the lane's block n is the instance's n + 1, none of them `dp`'s."""

    def __init__(self) -> None:
        self.world = TieredWorld(LAYERS, DEVICE, HOST, RESERVED)
        self.tiers, num_blocks = self.world.tiers, self.world.num_blocks
        self.table = CellTable(num_blocks)
        self.table.lease(range(1, num_blocks - 1), range(2, num_blocks))
        self.told = ToldUses(lambda: np.full(num_blocks, Use.HELD, dtype=np.uint8), self.table, num_blocks)
        self.tiers.watch_uses(self.told, self.told.hold)

    def step(self, blocks: list[int], num_tokens: int) -> None:
        """One request writes its blocks from the first token on."""
        self.told.hold(blocks)
        self.tiers.begin_step(np.array([blocks]), np.array([-(-num_tokens // BLOCK_SIZE)]), np.array([0]))
        self.tiers.end_step()
        assert self.tiers.check() == ()

    def tell(self, dead: list[int], cached: list[int]) -> None:
        """The leader says so of the instance's blocks."""
        uses = np.full(self.world.num_blocks, Use.HELD, dtype=np.uint8)
        uses[np.array(dead, dtype=int) - 1], uses[np.array(cached, dtype=int) - 1] = Use.DEAD, Use.CACHED
        self.told.hear(uses.tobytes())


FIRST, SECOND = list(range(2, 32)), list(range(50, 80))


@pytest.mark.parametrize("is_told", [False, True])
def test_what_is_of_no_use_makes_room_without_a_copy(is_told: bool) -> None:
    follower = Follower()
    follower.step(FIRST, len(FIRST) * BLOCK_SIZE)
    if is_told:
        follower.tell(dead=FIRST, cached=[])
    follower.step(SECOND, len(SECOND) * BLOCK_SIZE)
    assert (follower.tiers.counts.evicted == 0) == is_told
    follower.world.close()


def test_a_cached_prefix_is_kept_on_the_host() -> None:
    follower = Follower()
    follower.step(FIRST, len(FIRST) * BLOCK_SIZE)
    follower.tell(dead=FIRST[:10], cached=FIRST[10:])
    follower.step(SECOND, len(SECOND) * BLOCK_SIZE)
    placement = follower.tiers.placement
    is_here = (placement.index[:, FIRST] != 0) | placement.on_host[:, FIRST]
    assert is_here[:, 10:].all() and not is_here[:, :10].any()
    follower.world.close()


def test_what_is_taken_since_is_held() -> None:
    """By a step, or by KV that comes from elsewhere, though the leader has said before that it is of no use."""
    follower = Follower()
    follower.tell(dead=FIRST + SECOND, cached=[])
    follower.step(FIRST[:15], 15 * BLOCK_SIZE)
    follower.tiers.claim(np.array(FIRST[15:]))
    follower.step(SECOND, len(SECOND) * BLOCK_SIZE)
    placement = follower.tiers.placement
    assert ((placement.index[:, FIRST] != 0) | placement.on_host[:, FIRST]).all()
    follower.world.close()


def test_a_lane_that_begins_knows_nothing_yet() -> None:
    follower = Follower()
    follower.tell(dead=FIRST, cached=[])
    follower.told.begin()
    assert (follower.told() == Use.HELD).all()
    follower.world.close()
