"""Where bytes of cells can be. A tier has memory for some cells, and reads and writes whole ones."""

from typing import Protocol

import torch

from pengserve.replicas.kv.ledger import CellLedger, Cells
from pengserve.replicas.memory.layers import LayerMemory


class KvTier(Protocol):
    """One place for KV: the device today. What `read` returns and `write` takes is uint8 `[cells, block_bytes]`."""

    block_bytes: int
    device: torch.device  # of what `read` returns

    def reserve(self, cells: Cells) -> None:
        """Makes memory be there for these cells; what they hold is undefined.

        Raises:
            StepError: there is too little. Nothing has changed.
        """

    def holds(self, cells: Cells) -> bool:
        """Whether there is memory for all of them."""

    def read(self, cells: Cells) -> torch.Tensor:
        """A copy of the bytes of cells of one layer, in order."""

    def write(self, cells: Cells, data: torch.Tensor) -> None:
        """Writes cells of one layer, in order; `data` may be on any device."""

    def release(self, cells: Cells) -> None:
        """Gives up the memory of these cells. Raises ValueError where one is in flight."""


class DeviceTier:
    """The layers' KV on the device. Each layer has memory for blocks `[0, n)`: only its last ones come and go."""

    def __init__(self, memory: LayerMemory, ledger: CellLedger) -> None:
        """From now on what `ledger` knows to be in flight keeps its memory, also where other code wants that."""
        self._memory, self.block_bytes, self.device = memory, memory.sizes.block_bytes, memory.kv(0).device
        memory.before_shrink = ledger.require_still

    def reserve(self, cells: Cells) -> None:
        needed = max(cells.blocks, default=-1) + 1
        before = {layer: self._memory.num_blocks(layer) for layer in range(*cells.layers)}
        try:
            for layer, num_blocks in before.items():
                self._memory.resize_kv(layer, max(needed, num_blocks))
        except BaseException:
            for layer, num_blocks in before.items():
                self._memory.resize_kv(layer, num_blocks)
            raise

    def holds(self, cells: Cells) -> bool:
        return max(cells.blocks, default=-1) < min(map(self._memory.num_blocks, range(*cells.layers)))

    def read(self, cells: Cells) -> torch.Tensor:
        return self._memory.read_kv(cells.layers[0], cells.blocks)

    def write(self, cells: Cells, data: torch.Tensor) -> None:
        self._memory.write_kv(cells.layers[0], cells.blocks, data)

    def release(self, cells: Cells) -> None:
        layers = range(*cells.layers) if cells.blocks else ()
        keep = min(cells.blocks, default=0)
        for layer in layers:
            if sorted(cells.blocks) != list(range(keep, self._memory.num_blocks(layer))):
                raise ValueError(f"layer {layer} has {self._memory.num_blocks(layer)} blocks; only the last can go")
        for layer in layers:
            self._memory.resize_kv(layer, keep)
