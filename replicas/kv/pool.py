"""The device's KV of all layers as one pool of cells, which every layer can address.

A cell is the KV of one block in one layer. The pool has `num_layers * num_blocks` cells, and its memory is mapped twice
in a row, so that the tensor of each layer can begin at the layer's own cells and still reach all others:

    memory     cell 0 ............... cell T-1 | cell 0 ............... cell T-1        T = num_layers * num_blocks
    layer l                 [ index 0 ............... index T-1 ]                        begins at cell l * num_blocks
    index i of layer l      cell (l * num_blocks + i) mod T

So block b of every layer has index b where it is at home, as in vLLM's own KV tensors, and a layer that needs more
cells than its own uses those of others. Nothing is reserved for staging.
"""

from math import gcd

import numpy as np
import torch

from pengserve.replicas.memory.arena.backend import Backend


def whole_blocks(num_blocks: int, num_layers: int, block_bytes: int, granularity: int) -> int:
    """The most blocks, at most `num_blocks`, whose cells fill whole pages of `granularity` bytes."""
    unit = granularity // gcd(granularity, num_layers * block_bytes)
    return num_blocks // unit * unit


class DevicePool:
    """The memory of the cells. It knows no request and no table."""

    def __init__(self, backend: Backend, num_layers: int, num_blocks: int, block_bytes: int) -> None:
        """Takes all memory.

        Args:
            num_blocks: of each layer; see `whole_blocks`.
            block_bytes: of one block in one layer.

        Raises:
            ConfigError: the device does not have the memory.
        """
        self.num_layers, self.num_blocks, self.block_bytes = num_layers, num_blocks, block_bytes
        self.num_cells = num_layers * num_blocks
        self._backend, self._num_bytes = backend, self.num_cells * block_bytes
        backend.create(1, self._num_bytes)
        self._address = backend.reserve(2 * self._num_bytes)
        for copy in range(2):
            backend.map(self._address + copy * self._num_bytes, [0])
        self.cells = self._tensor(0)
        """uint8 `[num_cells, block_bytes]`."""
        self._bases = (np.arange(num_layers, dtype=np.int64) * num_blocks)[:, None]

    def layer(self, layer: int) -> torch.Tensor:
        """All cells as `layer` indexes them: uint8 `[num_cells, block_bytes]`."""
        return self._tensor(layer * self.num_blocks)

    def _tensor(self, first: int) -> torch.Tensor:
        flat = self._backend.tensor(self._address + first * self.block_bytes, self._num_bytes, self)
        return flat.view(self.num_cells, self.block_bytes)

    def cells_of(self, indices: np.ndarray) -> np.ndarray:
        """The cells of indices `[num_layers, n]`, a row for each layer."""
        found: np.ndarray = (indices + self._bases) % self.num_cells
        return found

    def index_of(self, layer: int, cells: np.ndarray) -> np.ndarray:
        """Indices in `layer` of cells `[n]`: the inverse of `cells_of`."""
        found: np.ndarray = (cells - layer * self.num_blocks) % self.num_cells
        return found

    def close(self) -> None:
        """Gives the memory back. No tensor may be touched any more."""
        self._backend.wait()
        for copy in range(2):
            self._backend.unmap(self._address + copy * self._num_bytes, 1)
        self._backend.free(self._address, 2 * self._num_bytes)
        self._backend.release()
