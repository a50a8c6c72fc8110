"""What a transfer reads and writes: rows of bytes. A block of one layer, a byte of weights, or a tile of some heads."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

import torch

from pengserve.replicas.kv.ledger import Cells
from pengserve.replicas.kv.tiers import KvTier
from pengserve.replicas.memory.kv_views import KvView, Tiles
from pengserve.replicas.memory.layers import LayerMemory

NO_CELLS = Cells((0, 0), ())


class Rows(ABC):
    """Rows `[0, num_rows)` of `row_bytes` each, which both members of a transfer number alike."""

    num_rows: int
    row_bytes: int
    device: torch.device
    form = 0  # equal on both members where they keep such bytes in the same order

    @property
    def cells(self) -> Cells:
        """What a copy of all rows reads or writes, as far as it is KV and known."""
        return NO_CELLS

    def is_ready(self, first: int, stop: int) -> bool:
        """Whether there is memory for these rows, and it is known where."""
        return True

    @abstractmethod
    def read(self, first: int, stop: int) -> torch.Tensor:
        """These rows as they are now, contiguous, in any form."""

    @abstractmethod
    def write(self, first: int, data: torch.Tensor) -> None:
        """Writes rows from `first` on: uint8 `[rows * row_bytes]`."""


class CellRows(Rows):
    """KV of blocks of one layer in a tier, a row each."""

    def __init__(self, tier: KvTier, layer: int, blocks: Sequence[int]) -> None:
        self.num_rows, self.row_bytes, self.device = len(blocks), tier.block_bytes, tier.device
        self._tier, self._layer, self._blocks = tier, layer, blocks

    @property
    def cells(self) -> Cells:
        return self._part(0, self.num_rows)

    def is_ready(self, first: int, stop: int) -> bool:
        return self._tier.holds(self._part(first, stop))

    def read(self, first: int, stop: int) -> torch.Tensor:
        return self._tier.read(self._part(first, stop))

    def write(self, first: int, data: torch.Tensor) -> None:
        rows = data.view(-1, self.row_bytes)
        self._tier.write(self._part(first, first + len(rows)), rows)

    def _part(self, first: int, stop: int) -> Cells:
        return Cells((self._layer, self._layer + 1), self._blocks[first:stop])


class WeightRows(Rows):
    """The weights of one layer, a byte a row. Their memory must be there as long as the transfer."""

    def __init__(self, memory: LayerMemory, layer: int, form: int) -> None:
        """`form`: the order in which linear weights are packed."""
        self._weights = memory.weights(layer)
        self.num_rows, self.row_bytes, self.device, self.form = len(self._weights), 1, self._weights.device, form

    def read(self, first: int, stop: int) -> torch.Tensor:
        return self._weights[first:stop]  # no copy: nothing writes weights while they are sent

    def write(self, first: int, data: torch.Tensor) -> None:
        self._weights[first : first + len(data)].copy_(data)


class PartRows(Rows):
    """KV of some layers and heads of a request, a tile a row (`memory/kv_views.py`). Rows may come one by one."""

    def __init__(self, view: KvView, tiles: Tiles, heads: tuple[int, int], first_layer: int) -> None:
        """
        Args:
            view: of these layers; the first of them is `first_layer` of the model.
            heads: of the view's own, half-open.
        """
        self.num_rows, self.device = tiles.count, view.device
        self.row_bytes = prod(view.shape(heads[1] - heads[0], 1, tiles.size)) * view.dtype.itemsize
        self._view, self._tiles, self._heads, self._first_layer = view, tiles, heads, first_layer

    @property
    def cells(self) -> Cells:
        layers = (self._first_layer, self._first_layer + self._view.num_layers)
        return Cells(layers, self._tiles.blocks.unique().tolist())

    def read(self, first: int, stop: int) -> torch.Tensor:
        found = self._view.read(self._tiles.part(first, stop), self._heads)
        return found.movedim(2, 0).contiguous()

    def write(self, first: int, data: torch.Tensor) -> None:
        count, (start, stop) = data.numel() // self.row_bytes, self._heads
        layers, kinds, _, heads, elements = self._view.shape(stop - start, count, self._tiles.size)
        rows = data.view(self._view.dtype).view(count, layers, kinds, heads, elements)
        self._view.write(self._tiles.part(first, first + count), rows.movedim(0, 2).to(self.device), self._heads)


class TileRows(Rows):
    """KV of some heads of all layers, a tile a row (`memory/kv_views.py`). All rows are read or written at once.

    Where the tiles are may become known only after their bytes have come: `bind` says so then.
    """

    def __init__(self, view: KvView, num_heads: int, num_tiles: int, size: int) -> None:
        """`num_tiles` tiles of `size` tokens."""
        self.num_rows, self.device = num_tiles, view.device
        self.row_bytes = prod(view.shape(num_heads, 1, size)) * view.dtype.itemsize
        self._view, self._shape, self._size = view, view.shape(num_heads, num_tiles, size), size
        self._heads = (0, num_heads)
        self._tiles: Tiles | None = None
        self._wanted: Sequence[int] | None = None

    def bind(
        self,
        view: KvView,
        requests: Sequence[tuple[Sequence[int], int]],
        heads: tuple[int, int],
        wanted: Sequence[int] | None = None,
    ) -> "TileRows":
        """The tiles are those of `requests` (blocks in order, number of tokens), and of `view`'s heads these.

        `wanted` are the rows that these requests have, where they do not have all; the others are dropped.
        """
        self._view, self._heads, self._wanted = view, heads, wanted
        self._tiles = view.tiles(requests, self._size)
        return self

    @property
    def cells(self) -> Cells:
        if self._tiles is None:
            return NO_CELLS
        return Cells((0, self._view.num_layers), self._tiles.blocks.unique().tolist())

    def is_ready(self, first: int, stop: int) -> bool:
        return self._tiles is not None

    def read(self, first: int, stop: int) -> torch.Tensor:
        assert self._tiles is not None and (first, stop) == (0, self.num_rows)
        return self._view.read(self._tiles, self._heads)

    def write(self, first: int, data: torch.Tensor) -> None:
        assert self._tiles is not None and first == 0
        tiles = data.view(self._view.dtype).view(self._shape).to(self.device)
        self._view.write(self._tiles, tiles if self._wanted is None else tiles[:, :, self._wanted], self._heads)
