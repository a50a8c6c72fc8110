"""Laws of two tiers whose device's memory changes hands: what stands still is found again, byte by byte."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pengserve.planners.layer_sizes import LayerSizes
from pengserve.replicas.kv.host_tier import HostTier
from pengserve.replicas.kv.ledger import CellLedger
from pengserve.replicas.kv.pool import DevicePool
from pengserve.replicas.kv.standing import stand_still
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.kv.tiered_rows import rows_at
from pengserve.replicas.kv.tiers import DeviceTier
from pengserve.replicas.memory.arena.open import open_arena
from pengserve.replicas.memory.layers import LayerMemory

LAYERS, BLOCK, CHUNK, RESERVED = 3, 4096, 8192, 3
SIZES = LayerSizes(num_chunks=3 * (2 + 6), chunk_bytes=CHUNK, weight_bytes=(2 * CHUNK,) * LAYERS, block_bytes=BLOCK)


class Instance:
    """Weights and KV in one arena, and a host tier; a layer's bytes of a block are its layer and number."""

    def __init__(self, host_blocks: int) -> None:
        self.arena = open_arena(torch.device("cpu"), SIZES.num_chunks * CHUNK, CHUNK)
        self.memory = LayerMemory(self.arena, SIZES, fewest_layers=1)
        self.pool = DevicePool(self.memory.side_by_side(), LAYERS, self.memory.base_blocks, BLOCK)
        self.host = HostTier(LAYERS, host_blocks, BLOCK)
        self.num_blocks = self.memory.base_blocks + host_blocks - RESERVED
        self.tiers = TieredKv(self.pool, self.host, num_blocks=self.num_blocks, block_size=4)
        self.tier = DeviceTier(self.memory, CellLedger(self.num_blocks, "dp"))

    def fill(self, blocks: np.ndarray) -> None:
        placement = self.tiers.placement
        self.tiers.claim(blocks)
        for layer in range(LAYERS):
            for block in blocks.tolist():
                if placement.index[layer, block]:
                    self.pool.layer(layer)[placement.index[layer, block]] = content(layer, block)
                    placement.on_host[layer, block] = False
                else:
                    self.host.memory[layer, placement.row[block]] = content(layer, block)


def content(layer: int, block: int) -> int:
    return 50 * layer + block


@pytest.fixture(params=[4, 30])
def instance(request: pytest.FixtureRequest) -> Iterator[Instance]:
    instance = Instance(request.param)
    yield instance
    instance.tiers.close()


def test_what_stands_still_is_read_by_layer_where_it_is(instance: Instance) -> None:
    """With room on the host and without: half of the blocks go along, and the others are forgotten."""
    tiers, rng = instance.tiers, random.Random(instance.num_blocks)
    for _ in range(20):
        blocks = np.arange(1, instance.num_blocks)
        instance.fill(blocks)
        for _ in range(6):
            chosen = np.array(rng.sample(blocks.tolist(), 4))
            rng.choice([tiers.write_behind, lambda b: tiers.bring(b, b), lambda b: tiers.place(b, [1])])(chosen)
        going = sorted(rng.sample(blocks.tolist(), len(blocks) // 2))
        found = stand_still(tiers, np.array(going))
        places = [found[block] for block in going]
        assert len(set(places)) == len(going)
        for layer in range(LAYERS):
            data = rows_at(instance.tier, instance.host, layer, places).read(0, len(going))
            assert data[:, 0].tolist() == data[:, -1].tolist() == [content(layer, block) for block in going]
        assert tiers.check() == ()
        gone = np.setdiff1d(blocks, going)
        assert not tiers.placement.index[:, gone].any() and (tiers.placement.row[gone] == -1).all()


def test_the_mirror_shows_the_layers_memory_also_after_it_was_elsewhere(instance: Instance) -> None:
    memory = instance.memory
    for turn in range(3):
        for layer in range(LAYERS):
            memory.kv(layer)[1].fill_(10 * turn + layer)
            assert instance.pool.layer(layer)[1, 0] == 10 * turn + layer
            last = (LAYERS - layer) * memory.base_blocks + 1  # around the end: block 1 of layer 0
            if last < instance.pool.num_cells:
                memory.kv(0)[1].fill_(99)
                assert instance.pool.layer(layer)[last, 0] == 99
        memory.drop_weights(2)
        memory.resize_kv(2, 0)
        memory.resize_kv(0, SIZES.num_blocks((0, 2)))
        memory.resize_kv(0, memory.base_blocks)
        memory.resize_kv(2, memory.base_blocks)
        memory.bring_weights(2)
        memory.mirror()
        assert memory.check((0, LAYERS), memory.base_blocks) == ()
