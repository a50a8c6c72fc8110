"""KV memory of a layer, `[blocks, elements]`, as vLLM's kernels index it: `[blocks, heads, tokens, content]`.

vLLM chooses the order within a block by attention backend, and names it after the axes from the outermost in. L is the
layer, B the block, H the head, N the token and C the content, which is K and V of one token and head:

    LBHNC   the tokens of a head lie side by side      CPU kernels; FlashInfer on Blackwell
    LBNHC   the heads of a token lie side by side      FlashAttention, FlashInfer, Triton: what vLLM takes on CUDA

In both a block of one layer is one run of bytes. In the others layers or heads of a block lie apart, so that memory
cannot change hands by layer and block, and no lane can have blocks of another size.
"""

from collections.abc import Sequence

import torch

from pengserve.planners.types.errors import UnsupportedShapeError

_IS_TOKEN_FIRST = {"LBHNC": False, "LBNHC": True}


def kv_blocks(memory: torch.Tensor, layout: str, *, num_heads: int, num_tokens: int) -> torch.Tensor:
    """`memory` `[blocks, elements]` as `[blocks, heads, tokens, content]`, with the strides that `layout` has.

    Raises:
        UnsupportedShapeError: in this layout a block is not one run of bytes in each layer.
    """
    if layout not in _IS_TOKEN_FIRST:
        raise UnsupportedShapeError(
            f"KV in the layout {layout} cannot be shared by shapes: "
            f"set VLLM_KV_CACHE_LAYOUT to {' or '.join(_IS_TOKEN_FIRST)}, or choose another attention backend"
        )
    if _IS_TOKEN_FIRST[layout]:
        return memory.view(len(memory), num_tokens, num_heads, -1).transpose(1, 2)
    return memory.view(len(memory), num_heads, num_tokens, -1)


def kv_memory(blocks: torch.Tensor) -> torch.Tensor:
    """The memory behind `[blocks, heads, tokens, content]`, in any order, as `[blocks, elements]`; no copy.

    Raises:
        UnsupportedShapeError: a block is not one run of elements.
    """
    num_blocks, *sizes = blocks.shape
    num_elements = 1
    for stride, size in sorted(zip(blocks.stride()[1:], sizes, strict=True)):
        if size > 1 and stride != num_elements:
            raise UnsupportedShapeError(f"the elements of a block are not side by side (strides {blocks.stride()})")
        num_elements *= size
    return blocks.as_strided((num_blocks, num_elements), (blocks.stride(0), 1))


def require_whole_blocks(block_size: int, kernel_block_sizes: Sequence[int]) -> None:
    """Raises UnsupportedShapeError where the kernels take blocks apart: their numbers are not those of the tables."""
    if split := [size for size in kernel_block_sizes if size != block_size]:
        raise UnsupportedShapeError(
            f"this attention backend splits blocks of {block_size} tokens into blocks of {split[0]}: "
            f"set engine.block_size so that every shape's block is one of its own"
        )
