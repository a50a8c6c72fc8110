"""Tiers on CUDA: copies beside kernels that still run, and random requests without a model."""

import random

import numpy as np
import pytest
import torch

from pengserve.replicas.engine.tiers.tier_runner import gathered, gathered_on_device
from pengserve.replicas.kv.copies import Copy, CopyEngine, Priority
from pengserve.replicas.kv.host_tier import HostTier
from pengserve.replicas.kv.pool import DevicePool, seen_twice
from pengserve.replicas.memory.arena.open import backend_of
from tests.gpu.figures import note_figure
from tests.replicas.kv.tiered_world import TieredWorld

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
LONG = 200_000_000  # cycles of the device, a tenth of a second


def tiers(num_layers: int, num_blocks: int, block_bytes: int) -> tuple[CopyEngine, DevicePool, HostTier]:
    memory = seen_twice(backend_of(torch.device("cuda", 0)), num_layers * num_blocks * block_bytes)
    pool = DevicePool(memory, num_layers, num_blocks, block_bytes)
    host = HostTier(num_layers, 2 * num_blocks, block_bytes, is_pinned=True)
    return CopyEngine(pool, host), pool, host


def test_the_pool_is_seen_twice() -> None:
    engine, pool, _ = tiers(4, 8, MIB)
    for layer in range(4):
        pool.layer(layer)[0] = layer + 1
    assert [int(pool.cells[layer * 8, 0]) for layer in range(4)] == [1, 2, 3, 4]
    pool.layer(3)[8] = 9  # beyond the end: the first cell again
    assert int(pool.cells[0, 0]) == 9
    engine.close()


def test_a_copy_to_the_host_has_what_a_running_kernel_writes() -> None:
    engine, pool, host = tiers(2, 8, MIB)
    torch.cuda._sleep(LONG)
    pool.cells[3].fill_(7)
    engine.wait(engine.submit(Copy(Priority.EVICT, 0, *(np.array([n]) for n in (3, 3, 5)), to_host=True)))
    assert host.memory[0, 5].unique().tolist() == [7]
    engine.close()


def test_staged_cells_are_written_after_a_running_kernel_has_read_them() -> None:
    engine, pool, host = tiers(2, 8, MIB)
    host.memory.fill_(9)
    pool.cells.fill_(1)
    torch.cuda.synchronize()
    copy = Copy(Priority.STAGE, 0, *(np.array([n]) for n in (2, 2, 0)), to_host=False, is_ready=False)
    engine.submit(copy)
    torch.cuda._sleep(LONG)
    read = pool.cells[2].clone()
    engine.release([copy])
    engine.wait(copy)
    torch.cuda.synchronize()
    assert read.unique().tolist() == [1] and pool.cells[2].unique().tolist() == [9]
    engine.close()


@pytest.mark.parametrize("is_scattered", [False, True])
def test_bandwidth_of_the_copy_engine(is_scattered: bool) -> None:
    num_blocks, block_bytes = 2048, 64 << 10
    engine, pool, host = tiers(2, num_blocks, block_bytes)
    order = np.random.default_rng(1).permutation(num_blocks) if is_scattered else np.arange(num_blocks)
    pool.cells[:num_blocks].copy_(torch.randint(0, 255, (num_blocks, block_bytes), dtype=torch.uint8, device="cuda"))
    expected = pool.cells[:num_blocks].cpu()
    rows = np.arange(num_blocks)
    for to_host in (True, False):
        for _ in range(3):
            engine.wait(engine.submit(Copy(Priority.EVICT, 0, order, order, rows, to_host=to_host)))
        how = "scattered cells" if is_scattered else "runs"
        way = "to host" if to_host else "to device"
        note_figure(f"copy engine, {how}, {way}", engine.bytes_per_s[to_host] / 1e9, "GB/s")
    assert torch.equal(host.memory[0, :num_blocks], expected[torch.from_numpy(order)])
    assert torch.equal(pool.cells[:num_blocks].cpu(), expected)
    engine.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_read_what_was_written(seed: int) -> None:
    """Blocks of 256 KiB, so that few of them fill the device."""
    rng = random.Random(seed)
    backend = backend_of(torch.device("cuda", 0))
    world = TieredWorld(4, 16, 24, 4, backend=backend, token_bytes=64 << 10)
    for _ in range(60):
        world.random_step(rng)
    assert world.tiers.counts.staged > 0 and world.tiers.counts.evicted > 0
    world.close()


def test_tables_are_gathered_as_on_a_cpu() -> None:
    source = np.random.default_rng(3)
    index = source.integers(0, 500, (5, 40), dtype=np.int32)
    tables = source.integers(0, 40, (7, 9), dtype=np.int32)
    slots = source.integers(-1, 40 * 16, 33)
    expected = gathered(index, tables, slots, 16)
    found = gathered_on_device(index, torch.from_numpy(tables).cuda(), torch.from_numpy(slots).cuda(), 16)
    assert np.array_equal(found[0].cpu().numpy(), expected[0])
    assert np.array_equal(found[1].cpu().numpy(), expected[1])
