"""Laws of KV views: what one shape wrote, another reads; packing is measured, not assumed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.types.errors import UnsupportedShapeError
from pengserve.replicas.memory.kv_views import BlockLayout, KvView, block_layout

H, B, D = 4, 8, 4
CPU = torch.device("cpu")


def packed_writer(num_heads: int, num_tokens: int):  # type: ignore[no-untyped-def]
    """K is `[head, D, tokens]` and V `[head, tokens, D]`, each head's K beside its V: as vLLM's CPU kernels do."""

    def write(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
        view = block.view(num_heads, 2, num_tokens * D)
        view[:, 0] = keys.permute(1, 2, 0).reshape(num_heads, -1)
        view[:, 1] = values.permute(1, 0, 2).reshape(num_heads, -1)

    return write


def layout_of(num_heads: int, num_tokens: int, dtype: torch.dtype = torch.float32) -> BlockLayout:
    write = packed_writer(num_heads, num_tokens)
    return block_layout(write, num_heads=num_heads, num_tokens=num_tokens, head_size=D, dtype=dtype, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layout_is_measured(dtype: torch.dtype) -> None:
    layout = layout_of(H, B, dtype)
    assert layout.strides(0) == (0, 2 * B * D, 1, B)
    assert layout.strides(1) == (B * D, 2 * B * D, D, 1)


def test_a_backend_that_loses_elements_is_refused() -> None:
    def write(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
        block[0, : H * B * D] = keys.flatten()

    with pytest.raises(UnsupportedShapeError, match="re-sharded"):
        block_layout(write, num_heads=H, num_tokens=B, head_size=D, dtype=torch.float32, device=CPU)


def test_packing_that_is_not_affine_works_through_an_index() -> None:
    order = torch.randperm(2 * H * B * D)

    def write(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
        block[0, order] = torch.cat([keys.flatten(), values.flatten()])

    layout = block_layout(write, num_heads=H, num_tokens=B, head_size=D, dtype=torch.float32, device=CPU)
    assert layout.strides(0) is None
    view = KvView([torch.zeros(5, 2 * H * B * D) for _ in range(2)], layout)
    tiles = view.tiles([([3, 1], 11), ([4], 3)], B // 2)
    assert (tiles.blocks.tolist(), tiles.parts.tolist()) == ([3, 3, 1, 4], [0, 1, 0, 0])
    data = torch.randn(2, 2, 4, H, B // 2 * D)
    view.write(tiles, data[:, :, :, 1:], (1, H))
    view.write(tiles, data[:, :, :, :1], (0, 1))
    assert torch.equal(view.read(tiles, (0, H)), data)
    keys, values = torch.randn(B, H, D), torch.randn(B, H, D)
    block = torch.zeros(1, 2 * H * B * D)
    write(keys, values, block)
    whole = KvView([block], layout)
    found = whole.read(whole.tiles([([0], B)], B), (0, H))[0]
    for kv, written in enumerate((keys, values)):
        assert torch.equal(whole.tokens(found[kv], kv)[0], written.transpose(0, 1))


def test_a_tile_divides_the_block() -> None:
    view = KvView([torch.zeros(5, 2 * H * B * D)], layout_of(H, B))
    with pytest.raises(ValueError, match="do not fill a block"):
        view.tiles([([1], 3)], 2 * B)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.randoms(use_true_random=False),
)
def test_kv_survives_any_way_through_shapes(lengths: list[int], source_factor: int, factor: int, random) -> None:  # type: ignore[no-untyped-def]
    """factor f: a member keeps H / f heads in blocks of f * B tokens; all members here, one after the other."""
    num_layers, num_blocks = 2, 30
    num_tiles = sum(-(-length // B) for length in lengths)
    data = torch.randn(num_layers, 2, num_tiles, H, B * D)

    def members(f: int) -> list[KvView]:
        layout = layout_of(H // f, f * B)
        return [KvView([torch.zeros(num_blocks, 2 * H * B * D) for _ in range(num_layers)], layout) for _ in range(f)]

    def places(f: int) -> list[tuple[list[int], int]]:
        free = random.sample(range(1, num_blocks), num_blocks - 1)
        return [([free.pop() for _ in range(-(-length // (f * B)))], length) for length in lengths]

    source_places, target_places = places(source_factor), places(factor)
    source, target = members(source_factor), members(factor)
    wide = H // source_factor
    for rank, view in enumerate(source):
        view.write(view.tiles(source_places, B), data[:, :, :, rank * wide : (rank + 1) * wide], (0, wide))
    whole = torch.cat([view.read(view.tiles(source_places, B), (0, wide)) for view in source], dim=3)
    narrow = H // factor
    for rank, view in enumerate(target):
        for head in range(narrow):  # head by head, as pieces from several members come
            piece = whole[:, :, :, rank * narrow + head][:, :, :, None]
            view.write(view.tiles(target_places, B), piece, (head, head + 1))
    found = torch.cat([view.read(view.tiles(target_places, B), (0, narrow)) for view in target], dim=3)
    assert torch.equal(found, data)


@given(st.integers(1, 2 * B), st.sampled_from([1, 2]))
def test_a_tile_holds_the_tokens_that_the_backend_wrote(num_tokens: int, f: int) -> None:
    keys, values = torch.randn(f * B, H, D), torch.randn(f * B, H, D)
    block = torch.zeros(1, 2 * H * f * B * D)
    packed_writer(H, f * B)(keys, values, block)
    view = KvView([block], layout_of(H, f * B))
    num_tokens = min(num_tokens, f * B)
    tiles = view.read(view.tiles([([0], num_tokens)], B), (1, H))[0]  # [2, n, h, B * D]
    for kv, written in enumerate((keys, values)):
        found = view.tokens(tiles[kv], kv).transpose(1, 2).flatten(0, 1)[:num_tokens]  # [tokens, h, D]
        assert torch.equal(found, written[:num_tokens, 1:])
