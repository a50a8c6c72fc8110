"""Laws of the KV of layers that is seen side by side: what is shown is the memory behind the layers, as it moves."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from pengserve.planners.layer_sizes import LayerSizes
from pengserve.planners.types.errors import UnsupportedShapeError
from pengserve.replicas.kv.pool import DevicePool
from pengserve.replicas.memory.arena.open import open_arena
from pengserve.replicas.memory.layers import LayerMemory
from tests.replicas.memory.arena.worlds import system_chunks

LAYERS, CHUNK, BLOCK = 4, 16 << 10, 8 << 10
STAGE = (1, 3)
SIZES = LayerSizes(num_chunks=40, chunk_bytes=CHUNK, weight_bytes=(2 * CHUNK,) * LAYERS, block_bytes=BLOCK)


class Place(NamedTuple):
    """Addresses, as a region has them."""

    address: int
    num_chunks: int


@pytest.fixture
def memory() -> Iterator[LayerMemory]:
    arena = open_arena(torch.device("cpu"), SIZES.num_chunks * CHUNK, CHUNK)
    yield LayerMemory(arena, SIZES, fewest_layers=1)
    arena.close()


def chunks_of(memory: torch.Tensor, first: int, count: int) -> dict[int, int]:
    """The physical chunks that the system has behind chunks `[first, first + count)` of a tensor's addresses."""
    place: Any = Place(memory.data_ptr() + first * CHUNK, count)
    return system_chunks(place, CHUNK)


def move_at_random(memory: LayerMemory, rng: random.Random) -> None:
    layer = rng.randrange(LAYERS)
    blocks = rng.randint(0, rng.choice([10, memory.max_blocks]))
    match rng.randrange(3):
        case 0:
            memory.drop_weights(layer)
        case 1 if memory.num_free_chunks >= SIZES.weight_chunks(layer):
            memory.bring_weights(layer)
        case _ if memory.room(layer, blocks):
            memory.resize_kv(layer, blocks)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_shown_twice_is_the_memory_behind_each_layer_and_no_other(memory: LayerMemory, seed: int) -> None:
    """Memory goes between layers' KV and weights; a layer may have less than is shown, or more."""
    rng, num_blocks = random.Random(seed), SIZES.num_blocks(STAGE)
    seen, num_chunks = memory.seen_side_by_side(STAGE, num_blocks), SIZES.kv_chunks(num_blocks)
    address, was_less, was_more = seen.memory.data_ptr(), False, False
    for _ in range(150):
        move_at_random(memory, rng)
        seen.show()
        for place in range(4):
            layer = STAGE[0] + place % 2
            backed = chunks_of(memory.kv(layer), 0, SIZES.kv_chunks(memory.max_blocks))
            num_backed = SIZES.kv_chunks(memory.num_blocks(layer))
            assert len(backed) == num_backed
            expected = {chunk: backed[chunk] for chunk in range(min(num_chunks, len(backed)))}
            shown = chunks_of(seen.memory, place * num_chunks, num_chunks)  # pytest would read what has no memory
            assert shown == expected
            was_less |= 0 < len(backed) < num_chunks
            was_more |= len(backed) > num_chunks
        assert memory.check_chunks() == ()
    is_there = seen.memory.data_ptr() == address
    assert is_there and was_less and was_more


def test_a_layer_with_part_of_its_memory_shows_its_first_blocks(memory: LayerMemory) -> None:
    """Where a pool addresses them, from any layer, and in both directions."""
    num_blocks = SIZES.num_blocks(STAGE)
    seen = memory.seen_side_by_side(STAGE, num_blocks)
    pool = DevicePool(seen.memory, 2, num_blocks, BLOCK)
    for layer, count in ((1, 4), (2, 6)):
        memory.resize_kv(layer, count)
        memory.kv(layer)[:count] = torch.arange(count, dtype=torch.uint8).view(-1, 1) + 10 * layer
    seen.show()
    for index in range(4):
        assert (pool.layer(0)[index] == 10 + index).all() and (pool.layer(1)[num_blocks + index] == 10 + index).all()
    for index in range(6):
        assert (pool.layer(1)[index] == 20 + index).all() and (pool.layer(0)[num_blocks + index] == 20 + index).all()
    pool.layer(1)[num_blocks + 3] = 99
    assert (memory.kv(1)[3] == 99).all()


def test_blocks_that_do_not_fill_chunks_are_not_seen_side_by_side() -> None:
    """Between two layers there would be bytes of none."""
    sizes = LayerSizes(num_chunks=40, chunk_bytes=CHUNK, weight_bytes=(CHUNK,) * 2, block_bytes=12 << 10)
    arena = open_arena(torch.device("cpu"), sizes.num_chunks * CHUNK, CHUNK)
    with pytest.raises(UnsupportedShapeError, match="no whole blocks"):
        LayerMemory(arena, sizes, fewest_layers=1).seen_side_by_side((0, 2), 4)
    arena.close()
