"""Laws of the tables that a step gets: each layer's are contiguous rows, and say where the blocks are."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from pengserve.replicas.engine.tier_runner import TierRunner
from pengserve.replicas.kv.tiered import StepTables

pytestmark = pytest.mark.slow

NAMES = ["layers.0", "layers.1", "layers.2"]
SIZE = 4  # tokens of a block


@pytest.mark.parametrize("num_rows", [1, len(NAMES)])
def test_each_layer_gets_its_own_tables(num_rows: int) -> None:
    rng = np.random.default_rng(1)
    index = rng.integers(1, 50, (num_rows, 20)).astype(np.int32)
    blocks = torch.from_numpy(rng.integers(0, 20, (5, 7)).astype(np.int32))
    slots = torch.tensor([3, 17, -1, 79, 40])
    metadata = SimpleNamespace(block_table=blocks, slot_mapping=slots)
    context = SimpleNamespace(attn_metadata=dict.fromkeys(NAMES, metadata), slot_mapping=dict.fromkeys(NAMES, slots))
    runner = SimpleNamespace(execute_model=None, _model_forward=None)
    TierRunner(runner, SimpleNamespace(), NAMES, SIZE)._map(context, StepTables(index))
    for layer, name in enumerate(NAMES):
        row, found = index[layer if num_rows > 1 else 0], context.attn_metadata[name]
        assert found.block_table.is_contiguous() and found.slot_mapping.is_contiguous()
        assert found.block_table.dtype == blocks.dtype and found.slot_mapping.dtype == slots.dtype
        assert found.block_table.tolist() == row[blocks.numpy()].tolist()
        expected = [-1 if slot < 0 else row[slot // SIZE] * SIZE + slot % SIZE for slot in slots.tolist()]
        assert found.slot_mapping.tolist() == context.slot_mapping[name].tolist() == expected
    assert metadata.block_table is blocks, "vLLM's own tables stay as they are"
