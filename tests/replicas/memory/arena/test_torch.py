"""torch on a region: the same results as on ordinary memory, where the region has grown too."""

from collections.abc import Iterator

import pytest
import torch

from pengserve.replicas.memory.arena.arena import Arena, Region
from pengserve.replicas.memory.arena.open import open_arena

CHUNK = 64 << 10
WIDTH = 64  # elements of a block; a chunk has 256 blocks
BLOCKS = CHUNK // 4 // WIDTH


@pytest.fixture
def grown() -> Iterator[tuple[Arena, Region, torch.Tensor]]:
    """A KV region of two chunks whose tail has two more, taken from weights; its view was bound before it grew."""
    arena = open_arena(torch.device("cpu"), 4 * CHUNK, CHUNK)
    weights, kv = arena.reserve(2 * CHUNK, "weights"), arena.reserve(16 * CHUNK, "kv")
    arena.map(weights, 0, 2)
    arena.map(kv, 0, 2)
    view = kv.tensor(torch.float32).view(-1, WIDTH)
    weights.tensor(torch.float32).fill_(float("nan"))
    arena.move(weights, (0, 2), kv, 2)
    yield arena, kv, view
    arena.close()


@pytest.fixture
def filled(grown: tuple[Arena, Region, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The mapped part of the region, old and new, and the same numbers in ordinary memory."""
    view = grown[2][: 4 * BLOCKS]
    ordinary = torch.randn(4 * BLOCKS, WIDTH, generator=torch.Generator().manual_seed(1))
    view.copy_(ordinary)
    return view, ordinary


def test_matmul(filled: tuple[torch.Tensor, torch.Tensor]) -> None:
    view, ordinary = filled
    assert torch.equal(view @ view.T, ordinary @ ordinary.T)


def test_matmul_into_the_tail(filled: tuple[torch.Tensor, torch.Tensor]) -> None:
    view, ordinary = filled
    torch.matmul(view[:WIDTH], ordinary[:WIDTH], out=view[-WIDTH:])
    assert torch.equal(view[-WIDTH:], ordinary[:WIDTH] @ ordinary[:WIDTH])
    assert torch.equal(view[:-WIDTH], ordinary[:-WIDTH])


def test_index_select_across_the_old_end(filled: tuple[torch.Tensor, torch.Tensor]) -> None:
    view, ordinary = filled
    index = torch.tensor([0, 2 * BLOCKS - 1, 2 * BLOCKS, 4 * BLOCKS - 1])
    assert torch.equal(view.index_select(0, index), ordinary[index])


def test_index_put_across_the_old_end(filled: tuple[torch.Tensor, torch.Tensor]) -> None:
    view, ordinary = filled
    index = torch.tensor([1, 2 * BLOCKS - 1, 2 * BLOCKS, 4 * BLOCKS - 1])
    values = torch.ones(4, WIDTH)
    view.index_put_((index,), values)
    ordinary.index_put_((index,), values)
    assert torch.equal(view, ordinary)


def test_index_put_through_the_whole_view(grown: tuple[Arena, Region, torch.Tensor]) -> None:
    _, _, whole = grown  # most of it is not mapped: block ids alone guard it
    index = torch.tensor([3 * BLOCKS, 4 * BLOCKS - 1])
    whole.index_put_((index,), torch.full((2, WIDTH), 7.0))
    assert torch.equal(whole.index_select(0, index), torch.full((2, WIDTH), 7.0))


def test_strided_views_share_the_memory(filled: tuple[torch.Tensor, torch.Tensor]) -> None:
    view, ordinary = filled
    by_dim = view.as_strided((WIDTH, BLOCKS), (1, WIDTH), view.storage_offset() + 2 * BLOCKS * WIDTH)
    assert torch.equal(by_dim, ordinary[2 * BLOCKS : 3 * BLOCKS].T)
    by_dim.zero_()
    assert not view[2 * BLOCKS : 3 * BLOCKS].any()
    assert torch.equal(view[3 * BLOCKS :], ordinary[3 * BLOCKS :])


def test_bytes_of_another_dtype(grown: tuple[Arena, Region, torch.Tensor]) -> None:
    _, kv, view = grown
    view[0] = 1.0
    assert (kv.tensor(torch.bfloat16)[: 2 * WIDTH].view(-1, 2) == torch.tensor([0.0, 1.0], dtype=torch.bfloat16)).all()


def test_a_shrunk_region_keeps_the_rest(grown: tuple[Arena, Region, torch.Tensor]) -> None:
    arena, kv, view = grown
    view[: 2 * BLOCKS] = 4.0
    arena.unmap(kv, 2, 4)
    assert kv.mapped == ((0, 2),)
    assert (view[: 2 * BLOCKS] == 4.0).all()
