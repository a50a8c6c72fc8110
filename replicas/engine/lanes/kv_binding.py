"""KV memory that exists already, in place of what vLLM's runner would allocate."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pengserve.replicas.engine.vllm_seam import bind_kv_cache
from pengserve.replicas.memory.kv_layout import kv_blocks, require_whole_blocks

MemoryOf = Callable[[int, str], torch.Tensor]
"""Memory of a layer by its place among the layers and by its name: `[blocks, elements of a block]`, or as bytes."""


def bind_memory(
    runner: Any, memory_of: MemoryOf, kv_cache_config: Any, kernel_block_sizes: Sequence[int], *_: Any, **__: Any
) -> dict[str, torch.Tensor]:
    """Stands for `GPUModelRunner.initialize_kv_cache_tensors`: binds a view of all blocks of each layer, by name.

    Raises:
        UnsupportedShapeError: kernels or layout take blocks apart.
    """
    spec, layout = kv_cache_config.kv_cache_groups[0].kv_cache_spec, runner.cache_config.kv_cache_layout
    require_whole_blocks(spec.block_size, kernel_block_sizes)
    names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    views = {
        name: kv_blocks(
            memory_of(layer, name).view(spec.dtype), layout, num_heads=spec.num_kv_heads, num_tokens=spec.block_size
        )
        for layer, name in enumerate(names)
    }
    bind_kv_cache(
        views,
        runner.compilation_config.static_forward_context,
        runner.kv_caches,
        1,
        kv_cache_groups=kv_cache_config.kv_cache_groups,
    )
    return views
