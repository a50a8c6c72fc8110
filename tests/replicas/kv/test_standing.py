"""Laws of two tiers whose device's memory changes hands: what stands still is found again, byte by byte."""

import random
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch

from pengserve.planners.layer_sizes import LayerSizes
from pengserve.planners.types.errors import EngineError
from pengserve.replicas.kv.host_tier import HostTier
from pengserve.replicas.kv.ledger import CellLedger
from pengserve.replicas.kv.placement import Use
from pengserve.replicas.kv.pool import DevicePool
from pengserve.replicas.kv.standing import hold, let_go, stand_still, vacate
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.kv.tiered_rows import NO_ROW, BlockPlace, rows_at
from pengserve.replicas.kv.tiers import DeviceTier
from pengserve.replicas.memory.arena.open import open_arena
from pengserve.replicas.memory.layers import LayerMemory

LAYERS, BLOCK, CHUNK, RESERVED = 3, 4096, 8192, 3


def sizes_of(num_chunks: int) -> LayerSizes:
    """So many chunks of each layer are KV."""
    weights = (2 * CHUNK,) * LAYERS
    return LayerSizes(num_chunks=3 * (2 + num_chunks), chunk_bytes=CHUNK, weight_bytes=weights, block_bytes=BLOCK)


SIZES = sizes_of(6)
NONE = np.zeros(0, dtype=np.int64)


class Instance:
    """Weights and KV in one arena, and a host tier; a layer's bytes of a block are its layer and number."""

    def __init__(self, host_blocks: int, sizes: LayerSizes = SIZES, link_bytes_per_s: float = 0.0) -> None:
        self.arena = open_arena(torch.device("cpu"), sizes.num_chunks * CHUNK, CHUNK)
        self.memory = LayerMemory(self.arena, sizes, fewest_layers=1)
        self.pool = DevicePool(self.memory.side_by_side(), LAYERS, self.memory.base_blocks, BLOCK)
        self.host = HostTier(LAYERS, host_blocks, BLOCK)
        self.num_blocks = self.memory.base_blocks + host_blocks - RESERVED
        self.tiers = TieredKv(
            self.pool, self.host, num_blocks=self.num_blocks, block_size=4, link_bytes_per_s=link_bytes_per_s
        )
        self.elsewhere = self.arena.reserve(sizes.num_chunks * CHUNK, "elsewhere")
        self.tier = DeviceTier(self.memory, CellLedger(self.num_blocks, "dp"))

    def fill(self, blocks: np.ndarray) -> None:
        self.tiers.claim(blocks)
        self.write(blocks)

    def write(self, blocks: np.ndarray) -> None:
        """Writes blocks that have a place, where they are."""
        placement = self.tiers.placement
        for layer in range(LAYERS):
            for block in blocks.tolist():
                if placement.index[layer, block]:
                    self.pool.layer(layer)[placement.index[layer, block]] = content(layer, block)
                    placement.on_host[layer, block] = False
                else:
                    self.host.memory[layer, placement.row[block]] = content(layer, block)

    def has(self, blocks: Iterable[int]) -> bool:
        """Whether these blocks are whole, on device and host, wherever they are said to be."""
        placement = self.tiers.placement
        for layer in range(LAYERS):
            for block in blocks:
                index, row = int(placement.index[layer, block]), int(placement.row[block])
                sides = [self.pool.layer(layer)[index]] if index else []
                sides += [self.host.memory[layer, row]] if placement.on_host[layer, block] else []
                if not sides or not all(bool((side == content(layer, block)).all()) for side in sides):
                    return False
        return True

    def vacate(self, num_columns: int) -> None:
        """Takes memory away, and lets others write to it."""
        vacate(self.tiers, num_columns)
        columns = self.columns()
        assert (columns < num_columns).all(), "nothing is left in memory that goes"
        for layer in range(LAYERS):
            self.memory.resize_kv(layer, num_columns)
        self.memory.mirror()
        if count := self.arena.num_free:
            self.arena.map(self.elsewhere, 0, count)
            self.elsewhere.tensor(torch.uint8)[: count * CHUNK] = 255
            self.arena.unmap(self.elsewhere, 0, count)

    def grow(self, num_columns: int) -> None:
        for layer in range(LAYERS):
            self.memory.resize_kv(layer, num_columns)
        self.memory.mirror()
        self.tiers.placement.resize(num_columns)

    def columns(self) -> np.ndarray:
        """Of the layer that has it, the index of each cell in use."""
        index = self.tiers.placement.index
        found: np.ndarray = self.pool.cells_of(index)[index != 0] % self.pool.num_blocks
        return found

    def move_some(self, rng: random.Random, blocks: list[int]) -> None:
        """KV of a few of these blocks moves between device and host."""
        chosen = np.array(rng.sample(blocks, min(4, len(blocks))))
        tiers, layers = self.tiers, rng.sample(range(LAYERS), rng.randint(0, LAYERS))
        rng.choice([tiers.write_behind, lambda b: tiers.bring(b, b), lambda b: tiers.place(b, layers)])(chosen)


def content(layer: int, block: int) -> int:
    return 50 * layer + block


@pytest.fixture(params=[4, 30])
def instance(request: pytest.FixtureRequest) -> Iterator[Instance]:
    instance = Instance(request.param)
    yield instance
    instance.tiers.close()
    instance.arena.close()


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


@pytest.mark.parametrize("seed", range(6))
def test_blocks_keep_their_bytes_through_any_vacates_and_growth(instance: Instance, seed: int) -> None:
    """Blocks are written, moved, held and let go in between. A vacate fails exactly where there is too little room."""
    rng, tiers, most = random.Random(seed), instance.tiers, instance.pool.num_blocks
    known: set[int] = set()
    held: list[int] = []
    columns, num_vacated, num_refused = most, 0, 0
    for _ in range(150):
        free = [block for block in range(1, instance.num_blocks) if block not in known and block not in held]
        room = columns - 1 + instance.host.num_rows - RESERVED - len(known) - len(held)
        match rng.choice(["fill", "fill", "move", "hold", "vacate", "grow", "forget"]):
            case "fill" if free and room > 0 and not held:
                count = min(room, len(free))
                instance.fill(chosen := np.array(rng.sample(free, rng.randint(-(-count // 2), count))))
                known.update(chosen.tolist())
            case "move" if known:
                instance.move_some(rng, sorted(known))
            case "hold" if len(free) > 4 and not held:
                tiers.traffic.cancel(tiers.traffic.copies())
                empty = np.setdiff1d(np.arange(1, most), instance.columns())
                held = rng.sample(free, 4)
                count = max(4 - tiers.placement.num_free_rows, rng.randint(0, 4))
                if len(empty) < count:
                    held = []
                    continue
                at = np.zeros(4, dtype=np.int64)
                at[:count] = rng.sample(empty.tolist(), count)
                places = hold(tiers, np.array(held), at)
                assert [place.block for place in places] == at.tolist()
                assert [place.is_on_host for place in places] == [not column for column in at]
            case "vacate":
                if held:  # their KV comes into memory, and only then something goes
                    instance.grow(columns := most)
                    instance.write(np.array(held))
                    let_go(tiers, np.array(held))
                    known.update(held)
                    held = []
                target = rng.randint(2, columns)
                fits = len(known) - instance.host.num_rows <= target - 1
                if fits:
                    instance.vacate(columns := target)
                    num_vacated += 1
                else:
                    with pytest.raises(EngineError, match="no room"):
                        vacate(tiers, target)
                    instance.grow(columns)
                    num_refused += 1
            case "grow":
                instance.grow(columns := rng.randint(columns, most))
            case "forget" if known:
                tiers.traffic.cancel(tiers.traffic.copies())
                tiers.forget(np.array(gone := rng.sample(sorted(known), min(3, len(known)))))
                known.difference_update(gone)
        assert tiers.check() == ()
        tiers.traffic.wait(tiers.traffic.copies())
        assert instance.has(known) and tiers.check() == ()
    assert num_vacated > 5 and num_refused > 0


def test_what_is_held_stays_where_it_is_until_it_is_let_go(instance: Instance) -> None:
    """Also where there is no memory yet: two columns have some, and the blocks that come have others."""
    tiers, others = instance.tiers, np.array([1, 2, 3])
    instance.fill(others)
    instance.vacate(4)
    coming, columns = np.array([4, 5, 6, 7]), np.array([9, 11, 5, 0])
    places = hold(tiers, coming, columns)
    assert places[:3] == [BlockPlace(9), BlockPlace(11), BlockPlace(5)] and places[3].is_on_host
    assert tiers.check() == ()
    assert not instance.host.memory[:, places[3].row].any(), "what is not written of it is zero"
    tiers.room.make_room(instance.pool.num_cells, NONE)
    assert tiers.placement.index[:, coming].tolist() == [columns.tolist()] * LAYERS
    assert tiers.placement.row[coming].tolist() == [NO_ROW] * 3 + [places[3].row]
    assert instance.has(others.tolist()) and not (tiers.placement.index[:, others] != 0).all(), "the others left"
    instance.grow(12)
    instance.write(coming)
    let_go(tiers, coming)
    assert tiers.check() == ()
    instance.vacate(4)
    assert instance.has([*others.tolist(), *coming.tolist()]) and tiers.check() == ()


def test_columns_that_come_back_are_free_but_for_those_that_are_held(instance: Instance) -> None:
    tiers, most = instance.tiers, instance.pool.num_blocks
    instance.vacate(2)
    assert tiers.placement.free_columns().tolist() == [1] and tiers.placement.num_free == LAYERS
    hold(tiers, np.array([1, 2]), np.array([7, 3]))
    assert tiers.placement.free_columns().tolist() == [1] and tiers.check() == ()
    instance.grow(most)
    free = [column for column in range(1, most) if column not in (3, 7)]
    assert tiers.placement.free_columns().tolist() == free and tiers.check() == ()
    assert tiers.placement.num_free == LAYERS * len(free)


def test_more_kv_than_the_host_has_rows_for_cannot_be_held(instance: Instance) -> None:
    coming = np.arange(1, instance.host.num_rows + 2)
    with pytest.raises(EngineError, match="no room"):
        hold(instance.tiers, coming, np.zeros(len(coming), dtype=np.int64))


def test_no_copy_is_under_way_that_reads_memory_which_goes() -> None:
    """To make room, cached prefixes that leave next are copied to the host beside the steps."""
    instance = Instance(100, sizes_of(40), link_bytes_per_s=1e6)
    tiers, most = instance.tiers, instance.pool.num_blocks
    tiers.watch_uses(lambda: np.full(instance.num_blocks, Use.CACHED, dtype=np.uint8))
    blocks = np.arange(1, most)
    instance.fill(blocks)
    vacate(tiers, most - 8)
    assert tiers.traffic.copies() == []
    instance.vacate(most - 8)
    assert instance.has(blocks.tolist()) and tiers.check() == ()
    instance.tiers.close()
    instance.arena.close()
