"""Laws of KV that is read and written tile by tile where some of it is on the host."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.kv.tiered_view import TieredKvView
from pengserve.replicas.memory.kv_views import BlockLayout, KvView, Tiles
from tests.replicas.kv.tiered_world import BLOCK_SIZE, TOKEN_BYTES, TieredWorld

LAYERS, DEVICE, HOST, RESERVED = 3, 12, 30, 4
HEADS, HEAD_SIZE = 2, TOKEN_BYTES // 16  # of float32: K and V of two heads fill a token's bytes
TILE = BLOCK_SIZE // 2


@pytest.fixture
def world() -> Iterator[TieredWorld]:
    world = TieredWorld(LAYERS, DEVICE, HOST, RESERVED)
    yield world
    world.close()


def layout() -> BlockLayout:
    """Elements of a block side by side in the order K or V, token, head, dim."""
    place = torch.arange(2 * BLOCK_SIZE * HEADS * HEAD_SIZE).view(2, BLOCK_SIZE, HEADS, HEAD_SIZE)
    return BlockLayout(place)


def view_of(world: TieredWorld) -> TieredKvView:
    device = [world.pool.layer(layer).view(torch.float32) for layer in range(LAYERS)]
    return TieredKvView(device, world.host.cells.view(torch.float32), layout(), world.tiers)


def tiles_of(blocks: list[int], parts: list[int]) -> Tiles:
    return Tiles(TILE, torch.tensor(blocks), torch.tensor(parts))


def test_what_is_written_is_read_again_wherever_it_is_meanwhile(world: TieredWorld) -> None:
    """Against KV that has memory for everything: random tiles of random heads and layers, and blocks that move."""
    rng, view = random.Random(1), view_of(world)
    held = list(range(1, world.num_blocks))
    world.begin().blocks = held  # as many as there are: all are held
    plain = KvView([torch.zeros(world.num_blocks, layout().place.numel()) for _ in range(LAYERS)], layout())
    everything = tiles_of([b for b in held for _ in range(2)], [0, 1] * len(held))
    data = torch.randn(view.shape(HEADS, everything.count, TILE))
    for target in (view, plain):
        target.write(everything, data, (0, HEADS))
    for _ in range(200):
        chosen = rng.sample(range(everything.count), rng.randint(1, 12))
        tiles = tiles_of([everything.blocks[i].item() for i in chosen], [i % 2 for i in chosen])
        first = rng.randrange(LAYERS)
        stop = rng.randint(first + 1, LAYERS)
        heads = rng.choice([(0, 1), (1, 2), (0, 2)])
        mine, other = view.part(first, stop), plain.part(first, stop)
        assert torch.equal(mine.read(tiles, heads), other.read(tiles, heads))
        if rng.random() < 0.5:
            data = torch.randn(mine.shape(heads[1] - heads[0], tiles.count, TILE))
            for target in (mine, other):
                target.write(tiles, data, heads)
        blocks = np.array(sorted({int(block) for block in tiles.blocks}))
        action = rng.random()
        if action < 0.3:
            world.tiers.write_behind(blocks)
        elif action < 0.6:
            world.tiers.bring(blocks, blocks)
        elif action < 0.8:
            world.tiers.place(blocks, rng.sample(range(LAYERS), rng.randint(0, LAYERS)))
        assert world.tiers.check() == ()
    assert world.tiers.counts.evicted > 0, "the device never was too small"
    assert torch.equal(view.read(everything, (0, HEADS)), plain.read(everything, (0, HEADS)))


def test_what_was_never_written_is_an_error(world: TieredWorld) -> None:
    with pytest.raises(EngineError, match="neither on the device nor on the host"):
        view_of(world).read(tiles_of([5], [0]), (0, HEADS))


def test_a_dead_block_s_place_goes_to_what_comes(world: TieredWorld) -> None:
    view, most = view_of(world), world.num_blocks - 1
    dead = tiles_of(list(range(1, DEVICE)), [0] * (DEVICE - 1))
    view.write(dead, torch.ones(view.shape(HEADS, dead.count, TILE)), (0, HEADS))
    coming = list(range(DEVICE, 2 * DEVICE - 1))
    world.begin().blocks = coming
    tiles = tiles_of(coming, [0] * len(coming))
    view.write(tiles, torch.full(view.shape(HEADS, tiles.count, TILE), 2.0), (0, HEADS))
    assert world.tiers.counts.evicted == 0 and most > len(coming)
    assert (world.tiers.placement.index[:, coming] != 0).all(), "they are on the device, where those were"


def test_what_is_not_written_of_a_block_on_the_host_is_zero(world: TieredWorld) -> None:
    """Memory of the host is not cleared, and a NaN beside KV makes vLLM's attention on CPUs give NaN."""
    world.host.memory.view(torch.float32).fill_(torch.nan)
    view, coming = view_of(world), list(range(1, 2 * DEVICE))
    world.begin().blocks = coming
    tiles = tiles_of(coming, [0] * len(coming))
    view.write(tiles, torch.ones(view.shape(HEADS, tiles.count, TILE)), (0, HEADS))
    assert (world.tiers.placement.index[:, coming] == 0).any(), "some are on the host"
    rest = view.read(tiles_of(coming, [1] * len(coming)), (0, HEADS))
    assert torch.equal(rest, torch.zeros_like(rest))
