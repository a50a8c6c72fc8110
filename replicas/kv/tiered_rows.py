"""KV of whole blocks that a switch finds, or leaves, on either side of an instance's tiers."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from pengserve.replicas.kv.host_tier import HostCells
from pengserve.replicas.kv.ledger import Cells
from pengserve.replicas.kv.placement import NO_ROW
from pengserve.replicas.kv.rows import CellRows, Rows
from pengserve.replicas.kv.tiers import KvTier


class BlockPlace(NamedTuple):
    """Where one block is in all layers alike: this block of the device's memory, or this row of the host."""

    block: int
    row: int = NO_ROW

    @property
    def is_on_host(self) -> bool:
        """Whether it is a row of the host."""
        return self.row != NO_ROW


def on_device(blocks: Iterable[int]) -> list[BlockPlace]:
    """Places of these blocks of the device's memory."""
    return [BlockPlace(block) for block in blocks]


class PlacedRows(Rows):
    """KV of blocks of one layer, a row each."""

    def __init__(self, tier: KvTier, host: HostCells | None, layer: int, places: Sequence[BlockPlace]) -> None:
        """`host`: where a place may be on the host."""
        self.num_rows, self.row_bytes, self.device = len(places), tier.block_bytes, tier.device
        self._tier, self._layer = tier, layer
        self._host = host.cells if host is not None else None
        self._blocks = np.array([place.block for place in places], dtype=np.int64)
        self._rows = np.array([place.row for place in places], dtype=np.int64)
        if host is not None:
            self._at = host.at(layer, self._rows)  # of those that are on the host

    @property
    def cells(self) -> Cells:
        return self._cells(0, self.num_rows)

    def is_ready(self, first: int, stop: int) -> bool:
        return self._tier.holds(self._cells(first, stop))

    def read(self, first: int, stop: int) -> torch.Tensor:
        away = np.flatnonzero(self._rows[first:stop] != NO_ROW)
        if not len(away):
            return self._tier.read(self._cells(first, stop))
        here = np.flatnonzero(self._rows[first:stop] == NO_ROW)
        found = torch.empty(stop - first, self.row_bytes, dtype=torch.uint8, device=self.device)
        assert self._host is not None
        found[torch.from_numpy(away)] = self._host[torch.from_numpy(self._at[first + away])].to(self.device)
        if len(here):
            found[torch.from_numpy(here)] = self._tier.read(self._cells(first, stop))
        return found

    def write(self, first: int, data: torch.Tensor) -> None:
        rows = data.view(-1, self.row_bytes)
        stop = first + len(rows)
        away = np.flatnonzero(self._rows[first:stop] != NO_ROW)
        if not len(away):
            self._tier.write(self._cells(first, stop), rows)
            return
        here = np.flatnonzero(self._rows[first:stop] == NO_ROW)
        assert self._host is not None
        self._host[torch.from_numpy(self._at[first + away])] = rows[torch.from_numpy(away)].to(self._host.device)
        if len(here):
            self._tier.write(self._cells(first, stop), rows[torch.from_numpy(here)])

    def _cells(self, first: int, stop: int) -> Cells:
        """What is on the device of rows `[first, stop)`, in order."""
        blocks = self._blocks[first:stop][self._rows[first:stop] == NO_ROW]
        return Cells((self._layer, self._layer + 1), blocks.tolist())


def rows_at(tier: KvTier, host: HostCells | None, layer: int, places: Sequence[BlockPlace]) -> Rows:
    """Rows of these places."""
    if any(place.is_on_host for place in places):
        return PlacedRows(tier, host, layer, places)
    return CellRows(tier, layer, [place.block for place in places])
