"""The host tier of an instance while it is a stage of a pipeline: rows for blocks in the stage's own layers alone.

A row of the host tier has room for one block in all layers of the model. A stage has a few of these layers, so several
of its blocks share a row:

    host row r       layer 0 | 1 | 2 | 3          a stage of two layers:
                     block a   | block b          stage rows 2g and 2g + 1, where r is the row of group g

Members number stage rows alike; each has host rows of its own behind them, which it takes as they are needed.
"""

import copy
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pengserve.planners.layer_sizes import LayerRange
from pengserve.replicas.kv.arrivals import Arrivals
from pengserve.replicas.kv.copies import Copy, Priority, Sides, in_words
from pengserve.replicas.kv.placement import NO_ROW
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.memory.layers import LayerMemory


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
        self.arrivals = Arrivals(tiers.engine)

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
        """KV of blocks goes, or begins to come, in all layers of the stage. What goes is on the host on return.

        Raises:
            EngineError: a copy that was under way failed.
        """
        rows = np.asarray(swap.rows, dtype=np.int64)
        self.take(rows)
        self.arrivals.wait_for(swap.blocks, swap.rows if swap.to_host else ())
        if swap.to_host:
            self._save(swap, rows)
        else:
            self._bring(swap, rows)

    @torch.inference_mode()
    def _save(self, swap: Swap, rows: np.ndarray) -> None:
        started_s = time.perf_counter()
        for layer in range(*self._layers):
            data = in_words(self._memory.read_kv(layer, swap.blocks))
            self._words.index_copy_(0, torch.from_numpy(self.at(layer, rows)), data.to(self._words.device))
        num_cells = len(rows) * (self._layers[1] - self._layers[0])
        self._tiers.engine.account(num_cells * self.block_bytes, Priority.EVICT, True, started_s)

    def _bring(self, swap: Swap, rows: np.ndarray) -> None:
        blocks, copies = np.asarray(swap.blocks, dtype=np.int64), []
        for layer in range(*self._layers):
            places = self.at(layer, rows)
            order = np.argsort(places)  # neighbours on the host are one copy
            sides = Sides(in_words(self._memory.kv(layer)), self._words)
            to = blocks[order]
            copies.append(Copy(Priority.BRING, layer, to, to, places[order], to_host=False, sides=sides))
        self.arrivals.begin(swap.number, swap.blocks, swap.rows, copies)

    def wait_for(self, blocks: Iterable[int]) -> None:
        """A step is to read or write these blocks: none is on its way any more."""
        started_s = time.perf_counter()
        self.arrivals.wait_for(blocks)
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
        self.arrivals.wait_all()
        others = np.ones(self.num_host_rows, dtype=bool)
        others[[row // self.per_row for row in rows]] = False
        others &= self._taken != NO_ROW
        self._tiers.host.take_back(self._taken[others])
        self._taken[others] = NO_ROW

    def take_over(self, other: "StageRows") -> "StageRows":
        """The rows of a narrower pipeline, which ends, until `give_before`: what they hold is still to be read."""
        other.arrivals.wait_all()
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
        self.arrivals.forget()
        self.keep_only(())


def stage_rows_in_row(num_layers: int, stages: Sequence[LayerRange]) -> int:
    """Stage rows that a row of the host has room for, in any stage."""
    return num_layers // max(stop - first for first, stop in stages)
