"""Who has each cell of an instance's KV. One ledger an instance.

    (lane, layer, logical block) --table of the lane--> cell (layer, block) --tier--> bytes

A cell is the KV of one block in one layer. Lanes have whole blocks; copies read and write single layers of them.

    FREE         no group's lane has leased its block: it is the `dp` lane's, to use or to lend
    HELD         a group's lane has leased it
    IN FLIGHT    a copy reads or writes it; counted, and apart from who has it

Free and held blocks together are all blocks, always. What is in flight changes no hands and keeps its memory until the
copy has ended. A pipeline's lane has blocks beyond those of `dp`: these are never lent, but they may be in flight.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pengserve.planners.layer_sizes import LayerRange

NULL_BLOCK = 0  # vLLM's: never leased, the same in all lanes


class Cells(NamedTuple):
    """KV of some blocks in layers `[layers[0], layers[1])`."""

    layers: LayerRange
    blocks: Sequence[int] | np.ndarray

    @property
    def num_cells(self) -> int:
        """How many there are; a block that is named twice counts twice."""
        return (self.layers[1] - self.layers[0]) * len(self.blocks)


class CellLedger:
    """Leases of blocks `[1, num_blocks)` to lanes, and the copies under way. Block 0 is the null block of every lane.

    Raises ValueError where a block would get two owners, or none, or would be reused in flight: a programmer's
    mistake, never an effect of load. Ask `conflicts` first where load decides.
    """

    def __init__(self, num_blocks: int, first_lane: str) -> None:
        self.num_blocks = num_blocks
        self.num_in_flight = 0  # cells, once for each copy that reads or writes one
        self._owners: list[str] = [first_lane] * num_blocks
        self._counts: dict[str, int] = {first_lane: num_blocks - 1}
        self._copies = np.zeros((2, 0, 0), dtype=np.int32)  # [reads or writes, layer, block]; grows by need

    # Leases -----------------------------------------------------------------------------------------------------------

    def move(self, block_ids: Iterable[int], source: str, target: str) -> None:
        """Moves leases from lane `source` to lane `target`."""
        ids = list(block_ids)
        if moving := self._in_flight(ids):
            raise ValueError(f"blocks {moving} of {source} are in flight: end or cancel the transfer first")
        for block_id in ids:
            if block_id == NULL_BLOCK or self._owners[block_id] != source:
                raise ValueError(f"block {block_id} belongs to {self._owners[block_id]}, not to {source}")
            self._owners[block_id] = target
        self._counts[source] = self._counts.get(source, 0) - len(ids)
        self._counts[target] = self._counts.get(target, 0) + len(ids)

    def num_leased(self, lane: str) -> int:
        """Blocks that `lane` holds, used or not."""
        return self._counts.get(lane, 0)

    def leased(self, lane: str) -> list[int]:
        """The blocks that `lane` holds, ascending."""
        return [block_id for block_id, owner in enumerate(self._owners) if owner == lane and block_id != NULL_BLOCK]

    # Copies -----------------------------------------------------------------------------------------------------------

    def begin_copy(self, cells: Cells, *, writes: bool) -> None:
        """A copy reads or writes `cells` from now on."""
        if cells.num_cells:
            self._make_room(cells)
            self._count(cells, 1, writes)

    def end_copy(self, cells: Cells, *, writes: bool) -> None:
        """Ends `begin_copy` of the same cells."""
        if cells.num_cells:
            self._count(cells, -1, writes)

    def conflicts(self, cells: Cells, *, with_reads: bool = True) -> list[int]:
        """Blocks of `cells` that are in flight, ascending: these may not be reused, or written by another copy.

        Without `with_reads` only those that are written: no other copy may read these.
        """
        if not self.num_in_flight or not cells.num_cells:
            return []
        (first, stop), ids = cells.layers, np.asarray(cells.blocks)
        ids = ids[ids < self._copies.shape[2]]
        found = self._copies[0 if with_reads else 1 :, first:stop, ids].any(axis=(0, 1))
        in_flight: list[int] = np.unique(ids[found]).tolist() if found.any() else []
        return in_flight

    def require_still(self, layer: int, num_blocks: int) -> None:
        """Raises ValueError where a copy needs memory of `layer` at or beyond block `num_blocks`."""
        if self.num_in_flight and layer < self._copies.shape[1] and self._copies[:, layer, num_blocks:].any():
            raise ValueError(f"KV of layer {layer} is in flight beyond block {num_blocks} and cannot lose its memory")

    def check(self) -> tuple[str, ...]:
        """What is wrong, in sentences; empty when each block has one owner, and all copies are counted."""
        counted: dict[str, int] = {}
        for owner in self._owners[1:]:
            counted[owner] = counted.get(owner, 0) + 1
        booked = {lane: count for lane, count in self._counts.items() if count}
        wrong = [] if counted == booked else [f"the ledger counts {booked} but the blocks say {counted}"]
        in_flight = int(self._copies.sum())
        if in_flight != self.num_in_flight or (self._copies < 0).any():
            wrong.append(f"the ledger counts {self.num_in_flight} cells in flight but the cells say {in_flight}")
        return tuple(wrong)

    def _in_flight(self, block_ids: Sequence[int]) -> list[int]:
        return self.conflicts(Cells((0, self._copies.shape[1]), block_ids)) if self.num_in_flight else []

    def _count(self, cells: Cells, change: int, writes: bool) -> None:
        (first, stop), ids = cells.layers, np.asarray(cells.blocks)
        counts = self._copies[int(writes), first:stop]
        np.add.at(counts.T, ids, change)  # a block may be named twice
        self.num_in_flight += change * cells.num_cells
        if change < 0 and (counts[:, ids] < 0).any():
            raise ValueError(f"no copy {'writes' if writes else 'reads'} all of {cells}")

    def _make_room(self, cells: Cells) -> None:
        _, num_layers, num_blocks = self._copies.shape
        more_layers = max(0, cells.layers[1] - num_layers)
        more_blocks = max(0, int(np.max(cells.blocks)) + 1 - num_blocks)
        if more_layers or more_blocks:
            self._copies = np.pad(self._copies, ((0, 0), (0, more_layers), (0, more_blocks)))
