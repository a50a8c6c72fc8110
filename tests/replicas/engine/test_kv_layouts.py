"""Own views of KV memory have the strides that vLLM computes for each of its layouts."""

import pytest
import torch

pytest.importorskip("vllm")
from vllm.v1.kv_cache_interface import FullAttentionSpec, compute_layout_strides
from vllm.v1.kv_cache_layout import KVCacheLayout

from pengserve.planners.types.errors import UnsupportedShapeError
from pengserve.replicas.memory.kv_layout import kv_blocks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("layout", list(KVCacheLayout))
def test_strides_are_those_of_vllm(layout: KVCacheLayout, degree: int) -> None:
    num_heads, num_tokens, head_size, num_blocks = 8 // degree, 16 * degree, 32, 7
    spec = FullAttentionSpec(block_size=num_tokens, num_kv_heads=num_heads, head_size=head_size, dtype=torch.bfloat16)
    memory = torch.zeros(num_blocks, num_heads * num_tokens * 2 * head_size, dtype=torch.bfloat16)
    if layout.name not in ("LBHNC", "LBNHC"):
        with pytest.raises(UnsupportedShapeError, match="cannot be shared"):
            kv_blocks(memory, layout.name, num_heads=num_heads, num_tokens=num_tokens)
        return
    blocks = kv_blocks(memory, layout.name, num_heads=num_heads, num_tokens=num_tokens)
    _, *in_bytes = compute_layout_strides(spec, num_blocks, 1, layout)
    assert [stride * memory.element_size() for stride in blocks.stride()[:3]] == in_bytes[:3]
    assert blocks.shape[1:] == (spec.num_heads, spec.num_states, 2 * head_size)
