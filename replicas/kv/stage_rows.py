"""The host tier of an instance while it is a stage of a pipeline: rows for blocks in the stage's own layers alone.

A row of the host tier has room for one block in all layers of the model. A stage has a few of these layers, so several
of its blocks share a row:

    host row r       layer 0 | 1 | 2 | 3          a stage of two layers:
                     block a   | block b          stage rows 2g and 2g + 1, where r is the row of group g

Members number stage rows alike; each has host rows of its own behind them, which it takes as they are needed.
"""

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from pengserve.planners.layer_sizes import LayerRange
from pengserve.replicas.kv.copies import Copy, Priority, Sides, in_words
from pengserve.replicas.kv.placement import NO_ROW
from pengserve.replicas.kv.stage_copies import StageCopies
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.memory.layers import LayerMemory

_LAST_BLOCKS = 4  # of what goes to the host, those that go first; as many as a microbatch often takes


class Swap(NamedTuple):
    """KV of some blocks goes from the device to stage rows of the host, or comes back."""

    blocks: Sequence[int]
    rows: Sequence[int]
    to_host: bool
    number: int = 0  # of those that come back, from 1 on


class StageRows:
    """Belongs to the step thread."""

    def __init__(self, tiers: TieredKv, memory: LayerMemory, layers: LayerRange, per_row: int) -> None:
        """
        Args:
            layers: that the stage has.
            per_row: stage rows in a row of the host; see `stage_rows_in_row`.
        """
        self._tiers, self._memory, self._layers, self.per_row = tiers, memory, layers, per_row
        host = tiers.host
        self.num_host_rows, self.block_bytes = host.num_rows, host.block_bytes
        self.cells, self._words = host.cells, in_words(host.cells)
        self._taken = np.full(host.num_rows, NO_ROW, dtype=np.int64)  # by group, the host's row
        self._before: StageRows | None = None  # of a narrower pipeline, while they are read
        self.copies = StageCopies(tiers.engine)

    @property
    def num_rows(self) -> int:
        """Of this member's host tier."""
        return self.num_host_rows * self.per_row

    @property
    def num_own(self) -> int:
        """Those that are this stage's, or could be now: `dp` has nothing in them."""
        return (self._tiers.host.num_free + int((self._taken != NO_ROW).sum())) * self.per_row

    def num_beside(self, num_blocks: int) -> int:
        """Those that are left where `dp` keeps so many blocks on the host, and no others."""
        return max(0, self.num_host_rows - num_blocks) * self.per_row

    def at(self, layer: int, rows: np.ndarray) -> np.ndarray:
        """Where these stage rows' cells of one layer are among the host's `cells`; see `HostCells`."""
        groups, parts = np.divmod(rows, self.per_row)
        first, stop = self._layers
        places: np.ndarray = (parts * (stop - first) + layer - first) * self.num_host_rows + self._taken[groups]
        return places

    def swap(self, swap: Swap) -> None:
        """KV of blocks begins to go, or to come, in all layers of the stage.

        What goes leaves in parts, the last blocks first: vLLM hands these out before the others. So the microbatch that
        they make room for waits for a small part alone, and the rest is copied beside it.

        Raises:
            EngineError: a copy that was under way failed.
        """
        rows = np.asarray(swap.rows, dtype=np.int64)
        self.take(rows)
        for part in _parts(len(rows)) if swap.to_host else [slice(None)]:
            self._begin(swap._replace(blocks=swap.blocks[part], rows=swap.rows[part]))

    def _begin(self, swap: Swap) -> None:
        blocks, rows = np.asarray(swap.blocks, dtype=np.int64), np.asarray(swap.rows, dtype=np.int64)
        priority, copies = Priority.EVICT if swap.to_host else Priority.BRING, []
        for layer in range(*self._layers):
            places = self.at(layer, rows)
            order = np.argsort(places)  # neighbours on the host are one copy
            sides = Sides(in_words(self._memory.kv(layer)), self._words)
            cells = blocks[order]
            copies.append(Copy(priority, layer, cells, cells, places[order], to_host=swap.to_host, sides=sides))
        self.copies.begin(swap.blocks, swap.rows, copies, to_host=swap.to_host, number=swap.number)

    def wait_for(self, blocks: Iterable[int]) -> None:
        """A step is to read or write these blocks: none is on its way any more."""
        started_s = time.perf_counter()
        self.copies.wait_for(blocks)
        self._tiers.counts.stall_s += time.perf_counter() - started_s

    def take(self, rows: np.ndarray) -> None:
        """There is room for these rows from now on."""
        groups = np.unique(rows // self.per_row)
        new = groups[self._taken[groups] == NO_ROW]
        if len(new):
            self._taken[new] = self._tiers.host.lend(len(new))

    @property
    def num_own_host_rows(self) -> int:
        """Rows of the host that are this stage's, or free."""
        return self.num_own // self.per_row

    def num_host_rows_of(self, rows: Iterable[int]) -> int:
        """Rows of the host behind these stage rows, on any member."""
        return len({row // self.per_row for row in rows})

    def keep_only(self, rows: Iterable[int]) -> None:
        """All others hold nothing any more: the host's are free again."""
        self.copies.wait_all()
        others = np.ones(self.num_host_rows, dtype=bool)
        others[[row // self.per_row for row in rows]] = False
        others &= self._taken != NO_ROW
        self._tiers.host.take_back(self._taken[others])
        self._taken[others] = NO_ROW

    def take_over(self, other: "StageRows") -> "StageRows":
        """The rows of a narrower pipeline, which ends, until `give_before`: what they hold is still to be read."""
        other.copies.wait_all()
        self._before = copy.copy(other)
        other._taken = np.full(self.num_host_rows, NO_ROW, dtype=np.int64)
        return self._before

    def give_before(self) -> None:
        """What was taken over has been read."""
        if self._before is not None:
            self._before.give_all()
            self._before = None

    def give_all(self) -> None:
        """No row holds anything any more: the host's are free again."""
        self.give_before()
        self.copies.forget()
        self.keep_only(())


def _parts(count: int) -> Iterator[slice]:
    """Parts of so many, each twice as long as the one after it; the last one first."""
    stop, length = count, _LAST_BLOCKS
    while stop > 0:
        yield slice(max(0, stop - length), stop)
        stop, length = stop - length, 2 * length


def stage_rows_in_row(num_layers: int, stages: Sequence[LayerRange]) -> int:
    """Stage rows that a row of the host has room for, in any stage."""
    return num_layers // max(stop - first for first, stop in stages)
