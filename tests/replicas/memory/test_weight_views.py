"""Laws of weight views: shards of all ranks cover each part exactly once, and no byte is new."""

import pytest
import torch

from pengserve.planners.types.errors import UnsupportedShapeError
from pengserve.replicas.memory.weight_views import Shard, column_parts, new_bytes, qkv_parts, row_shard


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_shards_cover_the_weight_once(degree: int) -> None:
    weight = torch.randn(24, 8)
    shards = [Shard(rank, degree) for rank in range(degree)]
    gate_up = [column_parts(weight, [16, 8], shard) for shard in shards]
    assert torch.equal(torch.cat([parts[i] for i in (0, 1) for parts in gate_up]), weight)
    assert torch.equal(torch.cat([row_shard(weight, shard) for shard in shards], dim=1), weight)
    assert new_bytes([view for parts in gate_up for view in parts], [weight]) == 0


def test_a_tensor_parallel_product_equals_the_whole() -> None:
    x, up, down = torch.randn(3, 8), torch.randn(16, 8), torch.randn(8, 16)
    parts = []
    for rank in range(4):
        shard = Shard(rank, 4)
        hidden = x @ column_parts(up, [16], shard)[0].t()
        parts.append(hidden @ row_shard(down, shard).t())
    torch.testing.assert_close(sum(parts), x @ up.t() @ down.t())


@pytest.mark.parametrize(("degree", "kv_heads"), [(2, [[0], [1]]), (4, [[0], [0], [1], [1]])])
def test_kv_heads_are_split_or_replicated(degree: int, kv_heads: list[list[int]]) -> None:
    num_heads, num_kv_heads, head_size = 4, 2, 3
    weight = torch.arange((num_heads + 2 * num_kv_heads) * head_size)[:, None] // head_size
    for rank in range(degree):
        q, k, v = qkv_parts(
            weight, num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size, shard=Shard(rank, degree)
        )
        assert sorted(set(q.flatten().tolist())) == list(range(rank * 4 // degree, (rank + 1) * 4 // degree))
        assert sorted(set(k.flatten().tolist())) == [4 + head for head in kv_heads[rank]]
        assert sorted(set(v.flatten().tolist())) == [6 + head for head in kv_heads[rank]]


def test_what_does_not_split_is_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="do not split"):
        Shard(0, 4).rows(6)
    with pytest.raises(UnsupportedShapeError, match="replicated"):
        Shard(0, 4).heads(3)


def test_a_copy_is_found() -> None:
    weight = torch.randn(4, 4)
    assert new_bytes([weight[:2].clone()], [weight]) == 2 * 4 * 4
