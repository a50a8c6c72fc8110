"""Where the KV of each logical block is, layer by layer: a cell of the device, a row of the host, both, or neither.

    index     [layers, logical]    where the block is in the layer's tensor; 0: not on the device
    on_host   [layers, logical]    whether the block's row holds what the device has, or had
    row       [logical]            the block's row on the host; -1: none

A block is *at home* where it has its own id in every layer, and *uniform* where it has one index in all layers: a step
whose blocks are all at home needs no table, and one whose blocks are all uniform needs one for all layers.
Arrays alone: it knows no request and moves no bytes. Index 0 of each layer is vLLM's null block, which holds no KV.
"""

from collections.abc import Callable
from enum import IntEnum

import numpy as np

from pengserve.replicas.kv.host_tier import HostRows
from pengserve.replicas.kv.pool import DevicePool

NO_ROW = -1


class Use(IntEnum):
    """What the scheduler's block pool says of a logical block."""

    DEAD = 0  # no request has it and no prefix is cached in it: what it holds is of no use
    CACHED = 1  # no request has it, but a prefix that may be hit
    HELD = 2  # a request has it


Uses = Callable[[], np.ndarray]
"""`Use` of each logical block, uint8 `[logical]`."""


class Placement:
    """The tables, the free cells, and what must agree between them. Belongs to the step thread."""

    def __init__(self, pool: DevicePool, host: HostRows, num_blocks: int) -> None:
        """`num_blocks`: logical ones, the null block included."""
        self._pool, self._host = pool, host
        self.num_layers, self.num_blocks = pool.num_layers, num_blocks
        self.index = np.zeros((pool.num_layers, num_blocks), dtype=np.int32)
        self.on_host = np.zeros((pool.num_layers, num_blocks), dtype=bool)
        self.row = np.full(num_blocks, NO_ROW, dtype=np.int64)
        self.is_home = np.zeros(num_blocks, dtype=bool)
        self.is_uniform = np.zeros(num_blocks, dtype=bool)
        self.is_away = np.zeros((pool.num_layers, num_blocks), dtype=bool)  # is to be on the host alone
        self.used = np.zeros(num_blocks, dtype=np.int64)  # the last step that read it
        self.is_free = np.ones(pool.num_cells, dtype=bool)
        self._nulls = np.arange(pool.num_layers) * pool.num_blocks
        self.is_free[self._nulls] = False
        self.num_free = pool.num_cells - pool.num_layers
        self.num_columns = pool.num_blocks  # indices of each layer that have memory, from the first on
        self.is_home[0] = self.is_uniform[0] = True
        self._is_strange = np.zeros(num_blocks, dtype=bool)
        self._num_strange = 0  # blocks on the device that are not at home
        self.version = 0  # grows when a block has another place, or gets a row

    @property
    def is_plain(self) -> bool:
        """Whether all KV is on the device and at home, as in vLLM without tiers."""
        return not self._num_strange and self._host.num_free == self._host.num_rows

    # Cells ------------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> np.ndarray:
        """`count` free cells, neighbours where there are some. The caller has seen that there are so many.

        Indices that are free in all layers stay so as far as possible: a block that has one in all is read the fastest.
        """
        assert count <= self.num_free
        is_free = self.is_free.reshape(self.num_layers, -1)
        cells = np.flatnonzero(is_free & ~is_free.all(axis=0))[:count]
        if len(cells) < count:
            cells = np.flatnonzero(self.is_free)[:count]
        self.is_free[cells] = False
        self.num_free -= count
        return cells

    def take_columns(self, count: int) -> np.ndarray:
        """Takes indices that are free in all layers, as many as `count` if there are so many; these."""
        columns = self.free_columns()[:count]
        self.is_free[self._cells_at(columns)] = False
        self.num_free -= self.num_layers * len(columns)
        return columns

    def free_columns(self) -> np.ndarray:
        """Indices that are free in all layers, ascending."""
        return np.flatnonzero(self.is_free.reshape(self.num_layers, -1).all(axis=0))

    def resize(self, num_columns: int) -> None:
        """So many indices of each layer have memory, from the first on: no other cell is free, or becomes so. Blocks
        that have one of those that go are still to move.
        """
        before, self.num_columns = self.num_columns, num_columns
        if num_columns < before:
            gone = self._cells_at(np.arange(num_columns, before))
            self.num_free -= int(np.count_nonzero(self.is_free[gone]))
            self.is_free[gone] = False
        else:
            come = np.zeros(self._pool.num_cells, dtype=bool)
            come[self._cells_at(np.arange(before, num_columns))] = True
            come[self._held()] = come[self._nulls] = False
            self.is_free |= come
            self.num_free += int(come.sum())

    def hold_columns(self, blocks: np.ndarray, columns: np.ndarray) -> None:
        """Blocks without any cell have these indices in all layers, also where there is no memory yet."""
        cells = self._cells_at(columns)
        self.num_free -= int(np.count_nonzero(self.is_free[cells]))
        self.is_free[cells] = False
        self.index[:, blocks] = columns
        self._look(blocks)

    def strangers(self, num_columns: int) -> list[np.ndarray]:
        """By layer, blocks whose cells are at indices from `num_columns` on of any layer's own."""
        columns = self._pool.cells_of(self.index) % self._pool.num_blocks
        return [np.flatnonzero((self.index[layer] != 0) & (columns[layer] >= num_columns)) for layer in self.layers]

    @property
    def layers(self) -> range:
        """Of the device."""
        return range(self.num_layers)

    def _held(self) -> np.ndarray:
        found: np.ndarray = self._pool.cells_of(self.index)[self.index != 0]
        return found

    def give(self, cells: np.ndarray) -> None:
        """Frees cells that are taken. Raises ValueError where one is free already."""
        if self.is_free[cells].any():
            raise ValueError("a cell of the device would be freed twice")
        here = cells[cells % self._pool.num_blocks < self.num_columns]
        self.is_free[here] = True
        self.num_free += len(here)

    def put(self, layer: int, blocks: np.ndarray, cells: np.ndarray) -> None:
        """Blocks of `layer` that have no cell there have these, which are taken."""
        self.index[layer, blocks] = self._pool.index_of(layer, cells)
        self._look(blocks)

    def settle_at_home(self, blocks: np.ndarray) -> np.ndarray:
        """Gives blocks without any cell one index in all layers, their own where that is free; those that got none."""
        at_home = blocks[blocks < self._pool.num_blocks]
        if len(at_home):
            cells = self._cells_at(at_home)
            able = self.is_free[cells].all(axis=0)
            self._settle(at_home[able], at_home[able], cells[:, able])
        left: np.ndarray = blocks[self.index[0, blocks] == 0]
        if len(left):
            free = self.free_columns()
            places = free[-len(left) :] if len(left) <= len(free) else free
            self._settle(left[: len(places)], places, self._cells_at(places))
            left = left[len(places) :]
        return left

    def _settle(self, blocks: np.ndarray, places: np.ndarray, cells: np.ndarray) -> None:
        if len(blocks):
            self.is_free[cells] = False
            self.num_free -= cells.size
            self.index[:, blocks] = places
            self._look(blocks)

    def cells_at(self, layer: int, columns: np.ndarray) -> np.ndarray:
        """The cells of one layer that have these indices there, of their own layer's range."""
        found: np.ndarray = self._nulls[layer] + columns
        return found

    def _cells_at(self, places: np.ndarray) -> np.ndarray:
        return self._nulls[:, None] + places

    def cells(self, layer: int, blocks: np.ndarray) -> np.ndarray:
        """The cells of blocks that are on the device in `layer`."""
        found: np.ndarray = (self.index[layer, blocks] + self._nulls[layer]) % self._pool.num_cells
        return found

    def drop(self, layer: int, blocks: np.ndarray) -> None:
        """Frees the cells of blocks in one layer, as far as they have some."""
        blocks = blocks[self.index[layer, blocks] != 0]
        if len(blocks):
            self.give(self.cells(layer, blocks))
            self.index[layer, blocks] = 0
            self._look(blocks)

    def drop_all(self, blocks: np.ndarray) -> None:
        """Frees the cells of blocks in all layers."""
        indices = self.index[:, blocks]
        cells = self._pool.cells_of(indices)[indices != 0]
        if len(cells):
            self.give(cells)
            self.index[:, blocks] = 0
            self._look(blocks)

    def _look(self, blocks: np.ndarray) -> None:
        self.version += 1
        found = self.index[:, blocks]
        was_strange = np.count_nonzero(self._is_strange[blocks])
        self._is_strange[blocks] = found.any(axis=0) & (found != blocks).any(axis=0)
        self._num_strange += int(np.count_nonzero(self._is_strange[blocks]) - was_strange)
        self.is_uniform[blocks] = (found == found[0]).all(axis=0) & (found[0] != 0)
        self.is_home[blocks] = (found == blocks).all(axis=0)

    def exists(self, blocks: np.ndarray) -> np.ndarray:
        """Whether each block has KV in all layers, on either side."""
        found: np.ndarray = ((self.index[:, blocks] != 0) | self.on_host[:, blocks]).all(axis=0)
        return found

    def num_away(self, blocks: np.ndarray) -> int:
        """Cells of blocks that are not on the device."""
        return int((self.index[:, blocks] == 0).sum())

    def num_coming(self, blocks: np.ndarray) -> int:
        """Of them, those that are to be on the device."""
        return int(((self.index[:, blocks] == 0) & ~self.is_away[:, blocks]).sum())

    # Rows -------------------------------------------------------------------------------------------------------------

    def free_rows(self, blocks: np.ndarray) -> None:
        """Blocks have no copy on the host any more, and are to be on the device."""
        self.is_away[:, blocks] = False
        blocks = blocks[self.row[blocks] != NO_ROW]
        if len(blocks):
            self._host.give(self.row[blocks])
            self.row[blocks] = NO_ROW
            self.on_host[:, blocks] = False

    def take_rows(self, blocks: np.ndarray) -> np.ndarray:
        """Gives rows to blocks that have none, in order, as far as there are free ones; those that have one now."""
        missing = blocks[self.row[blocks] == NO_ROW][: self._host.num_free]
        if len(missing):
            self.row[missing] = self._host.take(len(missing))
            self.version += 1
        have: np.ndarray = blocks[self.row[blocks] != NO_ROW]
        return have

    @property
    def num_free_rows(self) -> int:
        """Rows that no block has."""
        return self._host.num_free

    def redundant(self) -> np.ndarray:
        """Blocks that have a row though the device holds them in all layers."""
        return np.flatnonzero((self.row != NO_ROW) & (self.index != 0).all(axis=0))

    # Laws -------------------------------------------------------------------------------------------------------------

    def check(self, elsewhere: np.ndarray) -> tuple[str, ...]:
        """What is wrong, in sentences. `elsewhere`: cells that copies under way have taken."""
        counts = np.bincount(np.concatenate([self._held(), elsewhere, self._nulls]), minlength=self._pool.num_cells)
        counts += self.is_free
        beyond = self._cells_at(np.arange(self.num_columns, self._pool.num_blocks))
        counts[beyond] += counts[beyond] == 0  # without memory, a cell need not have an owner
        wrong = []
        if (counts != 1).any():
            wrong.append(f"{int((counts != 1).sum())} cells of the device have no owner, or several")
        if self.num_free != int(self.is_free.sum()):
            wrong.append(f"{self.num_free} cells of the device are counted as free, {int(self.is_free.sum())} are")
        is_strange = (self.index != 0).any(axis=0) & ~self.is_home
        if not np.array_equal(is_strange, self._is_strange) or self._num_strange != int(is_strange.sum()):
            wrong.append("the count of blocks that are not at home is wrong")
        others = np.array(self._host.free_rows + self._host.lent_rows, dtype=np.int64)
        rows = np.concatenate([self.row[self.row != NO_ROW], others])
        if not np.array_equal(np.sort(rows), self._host.rows()):
            wrong.append("a row of the host has no owner, or several")
        if self.on_host[:, self.row == NO_ROW].any():
            wrong.append("a block without a row is said to be on the host")
        return tuple(wrong)
