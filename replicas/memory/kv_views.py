"""One KV memory read by lanes of different shapes (Flying Serving section 4.2), and re-sharding by head.

A layer's KV is `[num_blocks, bytes of a block]`. A lane of degree p keeps 1/f of the KV heads on each member, so that a
block holds f times the tokens in the same bytes (Eq. 2-3; f = p, or the number of KV heads where p is above it):

    shape   heads in a block   tokens in a block     elements of a block
    dp      H                  B                     2 * H * B * D
    tp p    H / f              f * B                 2 * H * B * D

Where a (K or V, head, token, dim) lies within a block is the attention backend's business (CPU kernels pack K), so it is
measured (`block_layout`), not assumed. What travels between members has one form for all shapes:

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
    """Affine place of an element within a block: `offset[kv] + h * head[kv] + t * token[kv] + d * dim[kv]`."""

    num_heads: int
    num_tokens: int
    head_size: int
    offset: tuple[int, int]
    head: tuple[int, int]
    token: tuple[int, int]
    dim: tuple[int, int]


def block_layout(
    write: WriteKv, *, num_heads: int, num_tokens: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> BlockLayout:
    """Measures the layout by letting the backend write every element's own number.

    Raises:
        UnsupportedShapeError: the backend packs KV in a way that is not affine.
    """
    shape = (num_tokens, num_heads, head_size)
    count = num_tokens * num_heads * head_size
    numbers = torch.arange(1, count + 1, device=device)
    digits = []
    for power in range(4):  # 128 ** 4 elements are more than any block has
        digit = (numbers // _DIGIT**power % _DIGIT).to(dtype).view(shape)
        block = torch.zeros(1, 2 * count, dtype=dtype, device=device)
        write(digit, torch.zeros_like(digit), block)
        keys = block[0].long()
        block = torch.zeros(1, 2 * count, dtype=dtype, device=device)
        write(torch.zeros_like(digit), digit, block)
        digits.append((keys, block[0].long()))
    places = []
    for kv in (0, 1):
        number = sum(digit[kv] * _DIGIT**power for power, digit in enumerate(digits))
        assert isinstance(number, torch.Tensor)
        place = torch.full((count + 1,), -1, dtype=torch.long, device=device)
        place[number] = torch.arange(2 * count, device=device)
        places.append(place[1:].view(shape))
    strides = [_affine(place) for place in places]
    if any(stride is None for stride in strides):
        raise UnsupportedShapeError("this attention backend packs KV in a way that cannot be re-sharded by head")
    keys_at, values_at = (stride for stride in strides if stride is not None)
    offset, head, token, dim = zip(keys_at, values_at, strict=True)
    return BlockLayout(num_heads, num_tokens, head_size, offset, head, token, dim)


def _affine(place: torch.Tensor) -> tuple[int, int, int, int] | None:
    """Offset and strides by head, token and dim of a `[tokens, heads, D]` place; None where it has none."""
    offset = int(place[0, 0, 0])
    token = int(place[1, 0, 0]) - offset if place.shape[0] > 1 else 1
    head = int(place[0, 1, 0]) - offset if place.shape[1] > 1 else place.numel()
    dim = int(place[0, 0, 1]) - offset if place.shape[2] > 1 else 1
    steps = [torch.arange(size, device=place.device) for size in place.shape]
    rebuilt = offset + steps[0][:, None, None] * token + steps[1][None, :, None] * head + steps[2] * dim
    return (offset, head, token, dim) if bool((rebuilt == place).all()) else None


class KvView:
    """One lane's KV of all layers on one member, addressed by physical block."""

    def __init__(self, layers: Sequence[torch.Tensor], layout: BlockLayout) -> None:
        """`layers`: per layer a contiguous `[num_blocks, elements of a block]` tensor (or a view of those bytes)."""
        self.layout = layout
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        size = (layout.num_heads, layout.num_tokens, layout.head_size)
        for layer in layers:
            num_blocks, elements = layer.shape
            keys, values = (
                layer.as_strided(
                    (num_blocks, *size),
                    (layer.stride(0), layout.head[kv], layout.token[kv], layout.dim[kv]),
                    layer.storage_offset() + layout.offset[kv],
                )
                for kv in (0, 1)
            )
            assert elements == 2 * keys[0].numel()
            self._views.append((keys, values))

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self._views)

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._views[0][0].dtype

    def read(self, blocks: Sequence[int], num_tokens: int, heads: tuple[int, int]) -> torch.Tensor:
        """KV of the first `num_tokens` in `blocks`, for the lane's own heads `[first, last)`: `[L, 2, h, T, D]`."""
        layout, (first, last) = self.layout, heads
        index = torch.tensor(blocks, dtype=torch.long)
        out = torch.empty(
            (self.num_layers, 2, last - first, num_tokens, layout.head_size), dtype=self.dtype, device=self._device
        )
        for layer, views in enumerate(self._views):
            for kv in (0, 1):
                # [N, h, T, D] -> [h, N * T, D]
                found = views[kv][index, first:last].transpose(0, 1)
                out[layer, kv] = found.reshape(last - first, -1, layout.head_size)[:, :num_tokens]
        return out

    def write(self, blocks: Sequence[int], data: torch.Tensor, heads: tuple[int, int]) -> None:
        """Inverse of `read`: stores `[L, 2, h, T, D]` as the first tokens of `blocks`. Other heads stay as they are."""
        layout, (first, last) = self.layout, heads
        index = torch.tensor(blocks, dtype=torch.long)
        num_heads, num_tokens = data.shape[2], data.shape[3]
        room = len(blocks) * layout.num_tokens
        for layer, views in enumerate(self._views):
            for kv in (0, 1):
                padded = data.new_zeros((num_heads, room, layout.head_size))
                padded[:, :num_tokens] = data[layer, kv]
                tiles = padded.view(num_heads, len(blocks), layout.num_tokens, layout.head_size)
                views[kv][index, first:last] = tiles.transpose(0, 1)

    @property
    def _device(self) -> torch.device:
        return self._views[0][0].device
