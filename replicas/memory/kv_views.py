"""One KV memory read by lanes of different shapes (Flying Serving section 4.2), and re-sharding by head.

A layer's KV is `[num_blocks, bytes of a block]`. A lane of degree p keeps 1/f of the KV heads on each member, so that a
block holds f times the tokens in the same bytes (Eq. 2-3; f = p, or the number of KV heads where p is above it):

    shape   heads in a block   tokens in a block     elements of a block
    dp      H                  B                     2 * H * B * D
    tp p    H / f              f * B                 2 * H * B * D

Where a (K or V, head, token, dim) lies within a block is the attention backend's business (CPU kernels pack K), so it
is measured (`block_layout`), not assumed. What travels between members has one form for all shapes:

    KV of n tokens:  [2, heads, n, D]      (K, V)

Legend of suffixes: N blocks, H heads, T tokens, D head size.
"""

from collections.abc import Callable, Sequence
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


class KvView:
    """One lane's KV of all layers on one member, addressed by physical block."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: BlockLayout) -> None:
        """`layers`: per layer `[num_blocks, elements of a block]`, the elements of a block side by side."""
        self.layout, self._layers = layout, list(layers)
        strides = [layout.strides(kv) for kv in (0, 1)]
        self._views: list[list[torch.Tensor]] = []  # [N, H, T, D] of K and V; empty where packing needs an index
        if all(strides):
            self._views = [[self._strided(layer, stride) for stride in strides if stride] for layer in layers]

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    def empty(self, num_heads: int, num_tokens: int) -> torch.Tensor:
        """Room for what `read` returns: `[L, 2, h, n, D]`."""
        size = (self.num_layers, 2, num_heads, num_tokens, self.layout.head_size)
        return torch.empty(size, dtype=self._layers[0].dtype, device=self._layers[0].device)

    def read(self, blocks: Sequence[int], num_tokens: int, heads: tuple[int, int]) -> torch.Tensor:
        """KV of the first `num_tokens` in `blocks`, for the lane's own heads `[first, last)`: `[L, 2, h, n, D]`."""
        first, last = heads
        index = torch.tensor(blocks, dtype=torch.long)
        out = self.empty(last - first, num_tokens)
        for layer, memory in enumerate(self._layers):
            for kv in (0, 1):
                if self._views:
                    tiles = self._views[layer][kv][index, first:last].transpose(0, 1)  # [h, N, T, D]
                else:
                    place = self.layout.place[kv][:, first:last]
                    tiles = memory[index][:, place.reshape(-1)].view(-1, *place.shape).permute(2, 0, 1, 3)
                out[layer, kv] = tiles.reshape(last - first, -1, self.layout.head_size)[:, :num_tokens]
        return out

    def write(self, blocks: Sequence[int], data: torch.Tensor, heads: tuple[int, int]) -> None:
        """Inverse of `read`: stores `[L, 2, h, n, D]` as the first tokens of `blocks`. Other heads stay as they are."""
        first, last = heads
        index = torch.tensor(blocks, dtype=torch.long)
        num_heads, num_tokens = data.shape[2], data.shape[3]
        room = len(blocks) * self.layout.num_tokens
        for layer, memory in enumerate(self._layers):
            for kv in (0, 1):
                padded = data.new_zeros((num_heads, room, self.layout.head_size))
                padded[:, :num_tokens] = data[layer, kv]
                tiles = padded.view(num_heads, len(blocks), self.layout.num_tokens, -1).transpose(0, 1)  # [N, h, T, D]
                if self._views:
                    self._views[layer][kv][index, first:last] = tiles
                else:
                    place = self.layout.place[kv][:, first:last]
                    memory[index[:, None], place.reshape(1, -1)] = tiles.transpose(1, 2).reshape(len(blocks), -1)

    def _strided(self, layer: torch.Tensor, strides: tuple[int, int, int, int]) -> torch.Tensor:
        offset, head, token, dim = strides
        size = (layer.shape[0], self.layout.num_heads, self.layout.num_tokens, self.layout.head_size)
        return layer.as_strided(size, (layer.stride(0), head, token, dim), layer.storage_offset() + offset)
