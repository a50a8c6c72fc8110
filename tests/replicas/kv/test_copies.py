"""Copies between device and host: what one engine does for several, and what happens where one fails."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from pengserve.planners.types.errors import HostTierError
from pengserve.replicas.kv.copies import CopiesBetween, Copy, Priority
from pengserve.replicas.kv.host_tier import LentRows
from pengserve.replicas.kv.pool import DevicePool, seen_twice
from pengserve.replicas.kv.traffic import Traffic
from pengserve.replicas.memory.arena.cpu import CpuBackend
from tests.replicas.kv.tiered_world import TieredWorld

LAYERS, DEVICE, HOST, STAGE_LAYERS, STAGE_DEVICE = 4, 6, 20, 2, 16


class Stage:
    """Two layers with memory of their own, on rows that an instance's host lends: its engine copies for both."""

    def __init__(self, world: TieredWorld) -> None:
        self.engine, block_bytes = world.tiers.engine, world.pool.block_bytes
        memory = seen_twice(CpuBackend(huge_pages=False), STAGE_LAYERS * STAGE_DEVICE * block_bytes)
        self.pool = DevicePool(memory, STAGE_LAYERS, STAGE_DEVICE, block_bytes)
        self.rows = LentRows(world.host, STAGE_LAYERS, LAYERS // STAGE_LAYERS)
        self.rows.borrow()
        self.copies = CopiesBetween(self.engine, self.pool, self.rows)

    def row(self, layer: int, row: int) -> torch.Tensor:
        found: torch.Tensor = self.rows.cells[int(self.rows.at(layer, np.array([row]))[0])]
        return found

    def copy(self, layer: int, cells: list[int], rows: list[int], *, to_host: bool) -> Copy:
        blocks = np.array(cells)
        priority = Priority.EVICT if to_host else Priority.BRING
        return Copy(priority, layer, blocks, blocks, np.array(rows), to_host=to_host)


@pytest.fixture
def world() -> Iterator[TieredWorld]:
    world = TieredWorld(LAYERS, DEVICE, HOST, 0)
    yield world
    world.close()


@pytest.mark.parametrize("seed", range(3))
def test_copies_between_other_memory_move_the_same_bytes_both_ways(world: TieredWorld, seed: int) -> None:
    """Against an account in which each copy is made at once; `dp` has its own device and rows, which stay as they are.

    What is under way never shares cells or rows here: who may copy what is the ledger's business.
    """
    rng, kept, stage = random.Random(seed), world.host.take(HOST // 2), Stage(world)
    world.host.memory[:, torch.from_numpy(kept)] = 77
    world.pool.cells.fill_(66)
    stage.pool.cells.random_(0, 256)
    stage.rows.clear(stage.rows.rows())
    device = stage.pool.cells.clone()
    nothing = torch.zeros(stage.pool.block_bytes, dtype=torch.uint8)
    host = {(layer, row): nothing for layer in range(STAGE_LAYERS) for row in stage.rows.rows().tolist()}
    for _ in range(40):
        copies = []
        for layer in range(STAGE_LAYERS):
            count, to_host = rng.randint(1, 8), rng.random() < 0.5
            cells = rng.sample(range(layer * STAGE_DEVICE, (layer + 1) * STAGE_DEVICE), count)
            rows = rng.sample(stage.rows.rows().tolist(), count)
            for cell, row in zip(cells, rows, strict=True):
                if to_host:
                    host[layer, row] = device[cell].clone()
                else:
                    device[cell] = host[layer, row]
            copies.append(stage.copies.submit(stage.copy(layer, cells, rows, to_host=to_host)))
        for copy in copies:
            stage.copies.wait(copy)
    assert torch.equal(stage.pool.cells, device)
    assert all(bool((stage.row(*place) == value).all()) for place, value in host.items())
    assert (world.pool.cells == 66).all() and (world.host.memory[:, torch.from_numpy(kept)] == 77).all()


def test_copies_end_where_they_were_begun(world: TieredWorld) -> None:
    stage, engine = Stage(world), world.tiers.engine
    theirs = stage.copies.submit(stage.copy(1, [17, 18], [3, 4], to_host=True))
    own = engine.submit(stage.copy(0, [1], [1], to_host=True))
    for copy in (theirs, own):
        stage.copies.wait(copy)
    assert stage.copies.has_news and engine.has_news
    assert stage.copies.finished() == [theirs] and engine.finished() == [own]
    assert not stage.copies.has_news and not engine.has_news


def test_a_copy_of_theirs_that_is_cancelled_ends_there_too(world: TieredWorld) -> None:
    stage, engine = Stage(world), world.tiers.engine
    copy = stage.copy(0, [1], [1], to_host=True)
    copy.is_ready = False
    stage.copies.submit(copy)
    stage.copies.cancel(copy)
    stage.copies.wait(copy)
    assert stage.copies.finished() == [copy] and copy.is_cancelled and not copy.failure and not engine.has_news


def test_all_bytes_go_over_one_link_and_count_there(world: TieredWorld) -> None:
    stage, engine = Stage(world), world.tiers.engine
    stage.copies.wait(stage.copies.submit(stage.copy(0, [1, 2, 3], [1, 2, 3], to_host=True)))
    assert engine.moved_bytes[True, Priority.EVICT] == 3 * stage.pool.block_bytes
    assert stage.copies.moved_bytes == engine.moved_bytes
    stage.copies.close()
    stage.copies.wait(stage.copies.submit(stage.copy(0, [1], [1], to_host=False)))
    assert engine.speed(to_host=True) == stage.copies.speed(to_host=True)


def test_after_one_has_failed_none_waits_for_ever(world: TieredWorld) -> None:
    """A copy to a cell that does not exist ends the thread: all later ones fail, of the engine's own too."""
    stage = Stage(world)
    blocks, engine = DEVICE + HOST, world.tiers.engine
    traffic = Traffic(stage.copies, stage.pool, stage.rows, blocks)
    traffic.wait([traffic.submit(stage.copy(0, [1], [1], to_host=True), lambda copy: None)])
    bad = stage.copy(0, [2], [2], to_host=False)
    bad.cells = np.array([STAGE_LAYERS * STAGE_DEVICE + 5])
    with pytest.raises(HostTierError, match="failed"):
        traffic.wait([traffic.submit(bad, lambda copy: None)])
    with pytest.raises(HostTierError, match="failed"):
        traffic.wait([traffic.submit(stage.copy(0, [3], [3], to_host=True), lambda copy: None)])
    own = engine.submit(stage.copy(0, [1], [1], to_host=True))
    engine.wait(own)
    assert own.failure == engine.failure == stage.copies.failure != ""
    assert traffic.copies() == [] and traffic.check() == ()
