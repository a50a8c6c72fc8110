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


def seen_twice(backend: Backend, num_bytes: int) -> torch.Tensor:
    """New memory that is mapped twice in a row: uint8 `[2 * num_bytes]`, whose halves are the same.

    Raises:
        ConfigError: the device does not have the memory.
    """
    backend.create(1, num_bytes)
    address = backend.reserve(2 * num_bytes)
    for copy in range(2):
        backend.map(address + copy * num_bytes, [0])
    return backend.tensor(address, 2 * num_bytes, backend)


class DevicePool:
    """The cells, as layers address them. It knows no request and no table."""

    def __init__(self, memory: torch.Tensor, num_layers: int, num_blocks: int, block_bytes: int) -> None:
        """
        Args:
            memory: as `seen_twice` makes it, of `num_layers * num_blocks` cells.
            num_blocks: of each layer; see `whole_blocks`.
            block_bytes: of one block in one layer.
        """
        self.num_layers, self.num_blocks, self.block_bytes = num_layers, num_blocks, block_bytes
        self.num_cells = num_layers * num_blocks
        self._memory = memory
        self.cells = self._tensor(0)
        """uint8 `[num_cells, block_bytes]`."""
        self._bases = (np.arange(num_layers, dtype=np.int64) * num_blocks)[:, None]

    def layer(self, layer: int) -> torch.Tensor:
        """All cells as `layer` indexes them: uint8 `[num_cells, block_bytes]`."""
        return self._tensor(layer * self.num_blocks)

    def _tensor(self, first: int) -> torch.Tensor:
        start, stop = (first + count for count in (0, self.num_cells))
        return self._memory[start * self.block_bytes : stop * self.block_bytes].view(-1, self.block_bytes)

    def cells_of(self, indices: np.ndarray) -> np.ndarray:
        """The cells of indices `[num_layers, n]`, a row for each layer."""
        found: np.ndarray = (indices + self._bases) % self.num_cells
        return found

    def index_of(self, layer: int, cells: np.ndarray) -> np.ndarray:
        """Indices in `layer` of cells `[n]`: the inverse of `cells_of`."""
        found: np.ndarray = (cells - layer * self.num_blocks) % self.num_cells
        return found
