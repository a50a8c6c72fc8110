"""Zero-copy views of full weights for tensor parallelism (Flying Serving section 4.1, Eq. 1).

Shapes: a linear weight is `[out, in]`. Column-parallel layers split `out` (dim 0), row-parallel ones `in` (dim 1).
Fused layers (q, k, v; gate, up) hold several column-parallel parts below each other, so that a rank's shard is one
range of rows in each part, and not one range of the whole.

    part   rows of the full weight       rank r of p has, of a part of n rows
    q      [0, q)                        [r * n / p, (r + 1) * n / p)
    k, v   [q, q + k), [q + k, ...)      the same over heads; where p > heads, head r * heads // p alone
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pengserve.planners.types.errors import UnsupportedShapeError


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `degree`."""

    rank: int
    degree: int

    def rows(self, num_rows: int) -> tuple[int, int]:
        """Half-open range of an evenly split dim.

        Raises:
            UnsupportedShapeError: it does not split evenly.
        """
        if num_rows % self.degree:
            raise UnsupportedShapeError(f"{num_rows} rows do not split over {self.degree} ranks")
        size = num_rows // self.degree
        return self.rank * size, (self.rank + 1) * size

    def heads(self, num_heads: int) -> tuple[int, int]:
        """Half-open range of KV heads. With fewer heads than ranks, neighbours hold the same head (as vLLM does).

        Raises:
            UnsupportedShapeError: neither divides the other.
        """
        if num_heads >= self.degree:
            return self.rows(num_heads)
        if self.degree % num_heads:
            raise UnsupportedShapeError(f"{num_heads} KV heads cannot be replicated over {self.degree} ranks")
        head = self.rank // (self.degree // num_heads)
        return head, head + 1


def column_parts(weight: torch.Tensor, part_sizes: Sequence[int], shard: Shard) -> list[torch.Tensor]:
    """One view per fused part, rows split evenly; `weight` is `[sum(part_sizes), in]`, a bias `[sum(part_sizes)]`."""
    views, start = [], 0
    for size in part_sizes:
        first, last = shard.rows(size)
        views.append(weight[start + first : start + last])
        start += size
    return views


def qkv_parts(
    weight: torch.Tensor, *, num_heads: int, num_kv_heads: int, head_size: int, shard: Shard
) -> list[torch.Tensor]:
    """Views of q, k and v by head. `weight` is `[(num_heads + 2 * num_kv_heads) * head_size, in]`, or such a bias."""
    (q_first, q_last), (kv_first, kv_last) = shard.rows(num_heads), shard.heads(num_kv_heads)
    k_start, v_start = num_heads * head_size, (num_heads + num_kv_heads) * head_size
    return [
        weight[q_first * head_size : q_last * head_size],
        weight[k_start + kv_first * head_size : k_start + kv_last * head_size],
        weight[v_start + kv_first * head_size : v_start + kv_last * head_size],
    ]


def row_shard(weight: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The columns of `weight` (`[out, in]`) that this rank's slice of the input meets: a strided view."""
    first, last = shard.rows(weight.shape[1])
    return weight[:, first:last]


def new_bytes(views: Sequence[torch.Tensor], base: Sequence[torch.Tensor]) -> int:
    """Bytes that `views` have outside the storages of `base`: zero proves that nothing was copied."""
    known = {tensor.untyped_storage().data_ptr() for tensor in base}
    seen: dict[int, int] = {}
    for view in views:
        storage = view.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
