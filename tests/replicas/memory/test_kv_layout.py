"""Laws of block orders: any order that keeps a block in one run is viewed without a copy; others are refused."""

import pytest
import torch

from pengserve.planners.types.errors import UnsupportedShapeError
from pengserve.replicas.memory.kv_layout import kv_blocks, kv_memory, require_whole_blocks
from pengserve.replicas.memory.kv_views import BlockLayout, KvView, block_layout

B, H, D = 8, 4, 4
LAYOUTS = ["LBHNC", "LBNHC"]


def as_kernels_write(layout: str, num_heads: int, num_tokens: int) -> BlockLayout:
    """A kernel that follows the strides of what it is given, as FlashAttention's and Triton's do."""

    def write(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
        blocks = kv_blocks(block, layout, num_heads=num_heads, num_tokens=num_tokens)
        key_cache, value_cache = blocks.split(D, dim=-1)
        key_cache[0], value_cache[0] = keys.transpose(0, 1), values.transpose(0, 1)

    return block_layout(
        write, num_heads=num_heads, num_tokens=num_tokens, head_size=D, dtype=torch.float32, device=torch.device("cpu")
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_shows_the_memory_and_leads_back_to_it(layout: str) -> None:
    memory = torch.arange(5 * H * B * 2 * D).view(5, -1)
    blocks = kv_blocks(memory, layout, num_heads=H, num_tokens=B)
    assert blocks.shape == (5, H, B, 2 * D)
    assert torch.equal(kv_memory(blocks), memory)
    assert kv_memory(blocks).data_ptr() == memory.data_ptr()
    assert torch.equal(kv_memory(blocks[2:]), memory[2:])
    strides = {"LBHNC": (B * 2 * D, 2 * D, 1), "LBNHC": (2 * D, H * 2 * D, 1)}
    assert blocks.stride()[1:] == strides[layout]


@pytest.mark.parametrize("layout", ["LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_a_layout_that_takes_blocks_apart_is_refused(layout: str) -> None:
    with pytest.raises(UnsupportedShapeError, match=f"{layout}.*VLLM_KV_CACHE_LAYOUT"):
        kv_blocks(torch.zeros(5, 2 * H * B * D), layout, num_heads=H, num_tokens=B)


def test_memory_that_is_not_one_run_a_block_is_refused() -> None:
    by_head = torch.zeros(H, 5, B, 2 * D).transpose(0, 1)  # LHBNC
    with pytest.raises(UnsupportedShapeError, match="side by side"):
        kv_memory(by_head)


def test_kernels_that_split_blocks_are_refused() -> None:
    require_whole_blocks(64, [64])
    with pytest.raises(UnsupportedShapeError, match="128 tokens into blocks of 64"):
        require_whole_blocks(128, [64])


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kv_goes_from_dp_to_tp_and_back_in_every_layout(layout: str, degree: int) -> None:
    num_tokens, num_layers = 3 * B - 2, 2
    keys, values = torch.randn(2, num_tokens, H, D)
    source_layout = as_kernels_write(layout, H, B)
    assert all(source_layout.strides(kv) for kv in (0, 1)), "rows are copied without an index"
    source = KvView([torch.zeros(6, 2 * H * B * D) for _ in range(num_layers)], source_layout)
    places = source.tiles([([4, 1, 3], num_tokens)], B)
    slots = torch.tensor([4, 1, 3]).repeat_interleave(B)[:num_tokens], torch.arange(num_tokens) % B
    for memory in source._layers:
        cache = kv_blocks(memory, layout, num_heads=H, num_tokens=B)
        cache[slots[0], :, slots[1], :D], cache[slots[0], :, slots[1], D:] = keys, values
    whole = source.read(places, (0, H))
    back = KvView([torch.zeros_like(memory) for memory in source._layers], source_layout)
    for rank in range(degree):
        heads = (rank * H // degree, (rank + 1) * H // degree)
        member_layout = as_kernels_write(layout, H // degree, degree * B)
        member = KvView([torch.zeros(6, 2 * H * B * D) for _ in range(num_layers)], member_layout)
        there = member.tiles([([5, 2], num_tokens)], B)
        member.write(there, source.read(places, heads), (0, H // degree))
        for memory in member._layers:
            cache = kv_blocks(memory, layout, num_heads=H // degree, num_tokens=degree * B)
            flat = cache[[5, 2]].transpose(1, 2).flatten(0, 1)[:num_tokens]  # [tokens, heads, 2 * D]
            assert torch.equal(flat[..., :D], keys[:, slice(*heads)])
            assert torch.equal(flat[..., D:], values[:, slice(*heads)])
        back.write(places, member.read(there, (0, H // degree)), heads)
    assert torch.equal(back.read(places, (0, H)), whole)
