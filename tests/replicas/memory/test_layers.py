"""Laws of weights and KV that share memory: every chunk has one owner, addresses and bytes stay."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.planners.layer_sizes import LayerSizes
from pengserve.planners.stages import stage_layers
from pengserve.planners.types.errors import ConfigError, StepError
from pengserve.replicas.memory.arena.open import open_arena
from pengserve.replicas.memory.layers import LayerMemory
from tests.support.effort import examples

CHUNK = 64 << 10
BLOCK = 24 << 10  # does not divide a chunk
CPU = torch.device("cpu")


def make_sizes(num_layers: int, num_chunks: int = 160) -> LayerSizes:
    weights = tuple(200_000 + 30_000 * (layer % 3) for layer in range(num_layers))
    return LayerSizes(num_chunks=num_chunks, chunk_bytes=CHUNK, weight_bytes=weights, block_bytes=BLOCK)


@pytest.fixture(scope="module")
def memory() -> Iterator[LayerMemory]:
    sizes = make_sizes(8)
    arena = open_arena(CPU, sizes.num_chunks * CHUNK, CHUNK)
    yield LayerMemory(arena, sizes, fewest_layers=2)
    arena.close()


def become(memory: LayerMemory, first: int, stop: int) -> None:
    """From `dp` to a stage."""
    for layer in range(memory.sizes.num_layers):
        if not first <= layer < stop:
            memory.drop_weights(layer)
            memory.resize_kv(layer, 0)
    for layer in range(first, stop):
        memory.resize_kv(layer, memory.sizes.num_blocks((first, stop)))


def back(memory: LayerMemory) -> None:
    for layer in range(memory.sizes.num_layers):
        memory.resize_kv(layer, min(memory.num_blocks(layer), memory.base_blocks))
    for layer in range(memory.sizes.num_layers):
        memory.bring_weights(layer)
        memory.resize_kv(layer, memory.base_blocks)


@given(st.lists(st.sampled_from([(0, 4), (4, 8), (0, 2), (2, 4), (6, 8), (3, 6)]), max_size=6))
@settings(max_examples=examples(25))
def test_any_stage_and_back_keeps_addresses_and_owners(memory: LayerMemory, stages: list[tuple[int, int]]) -> None:
    everything = memory.sizes.all_layers
    addresses = [memory.kv(layer).data_ptr() for layer in range(8)]
    for layers in stages:
        become(memory, *layers)
        assert memory.check(layers, memory.sizes.num_blocks(layers)) == ()
        memory.kv(layers[0])[memory.sizes.num_blocks(layers) - 1].fill_(7)  # the grown tail is memory
        back(memory)
        assert memory.check(everything, memory.base_blocks) == ()
        assert memory.is_whole()
    assert [memory.kv(layer).data_ptr() for layer in range(8)] == addresses


def test_what_is_kept_keeps_its_bytes(memory: LayerMemory) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randint(0, 255, memory.weights(i).shape, dtype=torch.uint8, generator=generator) for i in range(8)]
    for layer, data in enumerate(weights):
        memory.weights(layer).copy_(data)
        memory.kv(layer)[: memory.base_blocks].fill_(layer + 1)
    become(memory, 2, 6)
    for layer in range(2, 6):
        assert torch.equal(memory.weights(layer), weights[layer])
        assert (memory.kv(layer)[: memory.base_blocks] == layer + 1).all()
    back(memory)


@pytest.mark.parametrize("block_bytes", [BLOCK, 24_004, 24_001])
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("is_message", [False, True])
def test_blocks_are_read_written_and_copied_wherever_the_bytes_come_from(
    block_bytes: int, offset: int, is_message: bool
) -> None:
    sizes = LayerSizes(num_chunks=32, chunk_bytes=CHUNK, weight_bytes=(CHUNK,) * 2, block_bytes=block_bytes)
    arena = open_arena(CPU, sizes.num_chunks * CHUNK, CHUNK)
    memory = LayerMemory(arena, sizes, fewest_layers=1)
    expected = torch.zeros(memory.base_blocks, block_bytes, dtype=torch.uint8)
    memory.kv(1)[: memory.base_blocks] = 0
    ids = [5, 1, 7]
    received = torch.randint(0, 255, (offset + len(ids) * block_bytes,), dtype=torch.uint8)
    data = received[offset:].view(len(ids), block_bytes)
    if is_message:
        data = torch.frombuffer(memoryview(bytearray(received.numpy()))[offset:], dtype=torch.uint8).view(data.shape)
    memory.write_kv(1, ids, data)
    expected[ids] = data
    assert torch.equal(memory.kv(1)[: memory.base_blocks], expected)
    assert torch.equal(memory.read_kv(1, [7, 5]), expected[[7, 5]])
    memory.copy_kv(1, [5, 1, 2], [1, 2, 5])  # in a ring
    expected[[1, 2, 5]] = expected[[5, 1, 2]]
    assert torch.equal(memory.kv(1)[: memory.base_blocks], expected)
    assert memory.read_kv(1, []).shape == (0, block_bytes)
    arena.close()


def test_a_law_that_is_broken_is_named(memory: LayerMemory) -> None:
    memory.drop_weights(3)
    assert memory.check(memory.sizes.all_layers, memory.base_blocks) == ("the weights of layer 3 are missing",)
    memory.bring_weights(3)
    assert memory.check((0, 8), memory.base_blocks - 1)[0].startswith("layer 0 has")


def test_growth_beyond_the_memory_is_refused_and_changes_nothing(memory: LayerMemory) -> None:
    with pytest.raises(StepError):
        memory.resize_kv(0, memory.max_blocks)
    assert memory.is_whole()
    assert memory.check(memory.sizes.all_layers, memory.base_blocks) == ()


@given(num_layers=st.integers(2, 40), num_stages=st.integers(2, 8), num_chunks=st.integers(400, 4000))
def test_a_stage_has_more_than_its_share_of_blocks(num_layers: int, num_stages: int, num_chunks: int) -> None:
    """What s members hold together in a pipeline is more than what they hold apart, by the weights that are dropped."""
    if num_stages > num_layers:
        return
    sizes = make_sizes(num_layers, num_chunks)
    apart = sizes.num_blocks(sizes.all_layers)
    for first, stop in stage_layers(num_layers, num_stages):
        blocks = sizes.num_blocks((first, stop))
        used = sum(map(sizes.weight_chunks, range(first, stop))) + (stop - first) * sizes.kv_chunks(blocks)
        assert used <= num_chunks
        if (stop - first) * num_stages <= num_layers:
            assert blocks >= num_stages * apart - num_stages  # rounding to chunks


def test_a_budget_below_the_weights_is_refused() -> None:
    sizes = make_sizes(8, num_chunks=34)
    arena = open_arena(CPU, sizes.num_chunks * CHUNK, CHUNK)
    with pytest.raises(ConfigError, match="raise memory_bytes"):
        LayerMemory(arena, sizes, fewest_layers=4)
    arena.close()
