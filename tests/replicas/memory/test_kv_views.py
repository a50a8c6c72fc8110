"""Laws of KV views: what one shape wrote, another reads; packing is measured, not assumed."""

import pytest
import torch
from hypothesis import given, settings
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
    data = torch.randn(2, 2, H, 11, D)
    view.write([3, 1], data[:, :, 1:], (1, H))
    view.write([3, 1], data[:, :, :1], (0, 1))
    assert torch.equal(view.read([3, 1], 11, (0, H)), data)
    keys, values = torch.randn(B, H, D), torch.randn(B, H, D)
    block = torch.zeros(1, 2 * H * B * D)
    write(keys, values, block)
    found = KvView([block], layout).read([0], B, (0, H))[0]
    assert torch.equal(found, torch.stack([keys, values]).transpose(1, 2))


@settings(deadline=None)
@given(st.integers(1, 60), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.randoms(use_true_random=False))
def test_kv_survives_any_way_through_shapes(num_tokens: int, source_factor: int, factor: int, random) -> None:  # type: ignore[no-untyped-def]
    """factor f: a member keeps H / f heads in blocks of f * B tokens; all members here, one after the other."""
    num_layers, num_blocks = 2, 20
    data = torch.randn(num_layers, 2, H, num_tokens, D)

    def members(f: int) -> list[KvView]:
        layout = layout_of(H // f, f * B)
        return [KvView([torch.zeros(num_blocks, 2 * H * B * D) for _ in range(num_layers)], layout) for _ in range(f)]

    def blocks(f: int) -> list[int]:
        return random.sample(range(1, num_blocks), -(-num_tokens // (f * B)))

    source_blocks, target_blocks = blocks(source_factor), blocks(factor)
    source, target = members(source_factor), members(factor)
    wide = H // source_factor
    for rank, view in enumerate(source):
        view.write(source_blocks, data[:, :, rank * wide : (rank + 1) * wide], (0, wide))
    whole = torch.cat([view.read(source_blocks, num_tokens, (0, wide)) for view in source], dim=2)
    narrow = H // factor
    for rank, view in enumerate(target):
        for head in range(narrow):  # head by head, as pieces from several members come
            view.write(target_blocks, whole[:, :, rank * narrow + head][:, :, None], (head, head + 1))
    found = torch.cat([view.read(target_blocks, num_tokens, (0, narrow)) for view in target], dim=2)
    assert torch.equal(found, data)
