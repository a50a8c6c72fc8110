"""Laws of the tables that a step gets: each layer's are contiguous rows, and say where the blocks are."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
from pengserve.replicas.engine.tiers.tier_runner import TierRunner
from pengserve.replicas.kv.tiered import StepTables

pytestmark = pytest.mark.slow

NAMES = ["layers.0", "layers.1", "layers.2"]
SIZE = 4  # tokens of a block
NUM_READ = 5  # blocks


def test_each_layer_gets_its_own_tables() -> None:
    rng = np.random.default_rng(1)
    index = rng.integers(1, 50, (len(NAMES), 20)).astype(np.int32)
    blocks = torch.from_numpy(rng.integers(0, 20, (5, 7)).astype(np.int32))
    blocks[:, NUM_READ:] = 999  # of a step before
    slots = torch.tensor([3, 17, -1, 79, 40])
    metadata = SimpleNamespace(block_table=blocks, slot_mapping=slots)
    context = SimpleNamespace(attn_metadata=dict.fromkeys(NAMES, metadata), slot_mapping=dict.fromkeys(NAMES, slots))
    runner = SimpleNamespace(execute_model=None, _model_forward=None)
    TierRunner(runner, SimpleNamespace(), NAMES, SIZE)._map(context, StepTables(index), NUM_READ)
    for layer, name in enumerate(NAMES):
        row, found = index[layer], context.attn_metadata[name]
        assert found.block_table.is_contiguous() and found.slot_mapping.is_contiguous()
        assert found.block_table.dtype == blocks.dtype and found.slot_mapping.dtype == slots.dtype
        assert found.block_table.tolist() == row[blocks.numpy()[:, :NUM_READ]].tolist()
        expected = [-1 if slot < 0 else row[slot // SIZE] * SIZE + slot % SIZE for slot in slots.tolist()]
        assert found.slot_mapping.tolist() == context.slot_mapping[name].tolist() == expected
    assert metadata.block_table is blocks, "vLLM's own tables stay as they are"
