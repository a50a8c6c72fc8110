"""One KV memory read by lanes of different shapes (Flying Serving section 4.2), and re-sharding by head.

A layer's KV is `[num_blocks, bytes of a block]`. A lane of degree p keeps 1/f of the KV heads on each member, so that a
block holds f times the tokens in the same bytes (Eq. 2-3; f = p, or the number of KV heads where p is above it):

    shape   heads in a block   tokens in a block     elements of a block
    dp      H                  B                     2 * H * B * D
    tp p    H / f              f * B                 2 * H * B * D

Where a (K or V, head, token, dim) lies within a block is the attention backend's business (CPU kernels pack K), so it
is measured (`block_layout`), not assumed. What travels between members has one form for all shapes, tiles of equally
many tokens, as many as divide the blocks of all shapes (those of `dp`, usually):

    KV of n tiles:  [layers, 2, n, heads, tokens of a tile * D]      (2: K, V)

with the elements of a tile in the order in which the backend keeps them, token by token or dim by dim: rows are copied.
All requests that move between two members are one such tensor, so that the number of copies is that of layers.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from pengserve.planners.types.errors import UnsupportedShapeError

WriteKv = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values `[tokens, heads, D]` of slots `[0, tokens)` into a `[1, elements]` block."""

_DIGIT = 128  # integers up to 256 are exact in bfloat16


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the elements of a block are."""

    place: torch.Tensor  # [2, T, H, D]: (K or V, token, head, dim) -> element of the block

    @property
    def num_tokens(self) -> int:
        """Tokens in a block."""
        return self.place.shape[1]

    @property
    def num_heads(self) -> int:
        """KV heads in a block."""
        return self.place.shape[2]

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.place.shape[3]

    def strides(self, kv: int) -> tuple[int, int, int, int] | None:
        """Offset and strides by head, token and dim of K (0) or V (1); None where the packing is not affine."""
        place = self.place[kv]
        offset = int(place[0, 0, 0])
        token, head, dim = (
            int(place.select(axis, 1)[0, 0]) - offset if place.shape[axis] > 1 else 0 for axis in range(3)
        )
        steps = [torch.arange(size, device=place.device) for size in place.shape]
        rebuilt = offset + steps[0][:, None, None] * token + steps[1][:, None] * head + steps[2] * dim
        return (offset, head, token, dim) if torch.equal(rebuilt, place) else None


def block_layout(
    write: WriteKv, *, num_heads: int, num_tokens: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> BlockLayout:
    """Measures the layout by letting the backend write every element's own number, digit by digit.

    Raises:
        UnsupportedShapeError: the backend does not keep every element once.
    """
    shape = (num_tokens, num_heads, head_size)
    count = num_tokens * num_heads * head_size
    numbers = torch.arange(1, count + 1, device=device)
    found = [torch.zeros(2 * count, dtype=torch.long, device=device) for _ in (0, 1)]
    for power in range(4):  # 128 ** 4 elements are more than any block has
        digit = (numbers // _DIGIT**power % _DIGIT).to(dtype).view(shape)
        for kv in (0, 1):
            block = torch.zeros(1, 2 * count, dtype=dtype, device=device)
            write(*((digit, torch.zeros_like(digit)) if kv == 0 else (torch.zeros_like(digit), digit)), block)
            found[kv] += block[0].long() * _DIGIT**power
    places = []
    for number in found:
        if not torch.equal(number[number > 0].sort().values, numbers):
            raise UnsupportedShapeError("this attention backend packs KV in a way that cannot be re-sharded by head")
        place = torch.empty(count + 1, dtype=torch.long, device=device)
        place[number] = torch.arange(2 * count, device=device)
        places.append(place[1:].view(shape))
    return BlockLayout(torch.stack(places))


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where the tokens of some requests are in one lane's KV, a tile each."""

    size: int  # tokens of a tile; it divides the lane's block
    blocks: torch.Tensor  # [n]
    parts: torch.Tensor  # [n]: which tile of the block

    @property
    def count(self) -> int:
        """Number of tiles."""
        return len(self.blocks)

    def part(self, first: int, stop: int) -> "Tiles":
        """Tiles `[first, stop)` of these."""
        return Tiles(self.size, self.blocks[first:stop], self.parts[first:stop])


class KvView:
    """One lane's KV of all layers on one member, addressed by physical block."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: BlockLayout) -> None:
        """`layers`: per layer `[num_blocks, elements of a block]`, the elements of a block side by side."""
        self.layout, self._layers = layout, list(layers)
        self._strides = [layout.strides(kv) for kv in (0, 1)]
        self._views: dict[int, list[list[torch.Tensor]]] = {}  # by tile size; where packing needs no index
        self._by_dim = [strides is not None and strides[2] < strides[3] for strides in self._strides]
        self._parts: dict[tuple[int, int], KvView] = {}  # by range of layers

    @property
    def num_layers(self) -> int:
        """Layers of the model that this member has."""
        return len(self._layers)

    @property
    def dtype(self) -> torch.dtype:
        """Of an element."""
        return self._layers[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the KV is."""
        return self._layers[0].device

    def part(self, first: int, stop: int) -> "KvView":
        """The view of layers `[first, stop)` of these alone."""
        if (first, stop) == (0, self.num_layers):
            return self
        if (first, stop) not in self._parts:
            self._parts[first, stop] = KvView(self._layers[first:stop], self.layout)
        return self._parts[first, stop]

    def shape(self, num_heads: int, num_tiles: int, size: int) -> tuple[int, ...]:
        """Of what `read` returns."""
        return (len(self._layers), 2, num_tiles, num_heads, size * self.layout.head_size)

    def tiles(self, requests: Iterable[tuple[Sequence[int], int]], size: int) -> Tiles:
        """Tiles of requests, given as (blocks in order, number of tokens); the last tile of each may be part full.

        Raises:
            ValueError: `size` does not divide the block.
        """
        in_block, rest = divmod(self.layout.num_tokens, size)
        if rest:
            raise ValueError(f"tiles of {size} tokens do not fill a block of {self.layout.num_tokens}")
        blocks: list[int] = []
        parts: list[int] = []
        for ids, num_tokens in requests:
            for tile in range(-(-num_tokens // size)):
                blocks.append(ids[tile // in_block])
                parts.append(tile % in_block)
        return Tiles(size, *(torch.tensor(row, dtype=torch.long, device=self.device) for row in (blocks, parts)))

    def read(self, tiles: Tiles, heads: tuple[int, int]) -> torch.Tensor:
        """KV of these tiles, for the lane's own heads `[first, last)`: `[layers, 2, n, heads, size * D]`."""
        first, last = heads
        out = torch.empty(self.shape(last - first, tiles.count, tiles.size), dtype=self.dtype, device=self.device)
        for kv in (0, 1):
            index = None if all(self._strides) else self._index(tiles, kv, heads)
            for layer, memory in enumerate(self._layers):
                if index is not None:
                    out[layer, kv] = memory[tiles.blocks[:, None], index].view(out.shape[2:])
                    continue
                view = self._view(layer, kv, tiles.size)[:, :, first:last]
                plane = out[layer, kv].view(tiles.count, *view.shape[2:])
                if view.shape[1] == 1:  # a tile is a block: several times as fast
                    torch.index_select(view[:, 0], 0, tiles.blocks, out=plane)
                else:
                    plane.copy_(view[tiles.blocks, tiles.parts])
        return out

    def write(self, tiles: Tiles, data: torch.Tensor, heads: tuple[int, int]) -> None:
        """Inverse of `read`. Other heads stay as they are."""
        first, last = heads
        for kv in (0, 1):
            index = None if all(self._strides) else self._index(tiles, kv, heads)
            for layer, memory in enumerate(self._layers):
                if index is None:
                    view = self._view(layer, kv, tiles.size)[:, :, first:last]
                    view[tiles.blocks, tiles.parts] = data[layer, kv].view(tiles.count, *view.shape[2:])
                else:
                    memory[tiles.blocks[:, None], index] = data[layer, kv].flatten(1)

    def tokens(self, plane: torch.Tensor, kv: int) -> torch.Tensor:
        """`[n, heads, size, D]` of the K (0) or V (1) of one layer, `[n, heads, size * D]`."""
        head_size = self.layout.head_size
        if self._by_dim[kv]:
            return plane.unflatten(-1, (head_size, -1)).transpose(-1, -2)
        return plane.unflatten(-1, (-1, head_size))

    def _index(self, tiles: Tiles, kv: int, heads: tuple[int, int]) -> torch.Tensor:
        """Elements of the tiles within their blocks: `[n, heads * size * D]`."""
        place = self.layout.place[kv][:, heads[0] : heads[1]].unflatten(0, (-1, tiles.size))  # [parts, size, h, D]
        return place.transpose(1, 2).flatten(1)[tiles.parts]

    def _view(self, layer: int, kv: int, size: int) -> torch.Tensor:
        """`[blocks, tiles of a block, heads, ...]`, the rest in the backend's order"""
        if size not in self._views:
            self._views[size] = [[self._strided(m, other, size) for other in (0, 1)] for m in self._layers]
        return self._views[size][layer][kv]

    def _strided(self, layer: torch.Tensor, kv: int, size: int) -> torch.Tensor:
        strides = self._strides[kv]
        assert strides is not None
        offset, head, token, dim = strides
        shape = (layer.shape[0], self.layout.num_tokens // size, self.layout.num_heads, size, self.layout.head_size)
        steps = (layer.stride(0), size * token, head, token, dim)
        view = layer.as_strided(shape, steps, layer.storage_offset() + offset)
        return view.transpose(-1, -2) if self._by_dim[kv] else view
