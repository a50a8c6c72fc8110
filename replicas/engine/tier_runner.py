"""vLLM's runner over tiers: before each forward pass, tables that say where the KV is; in it, waiting for layers.

vLLM's own seams are used: `_model_forward`, which runs within the forward context, and the calls around each attention
that it makes for KV connectors (`wait_for_layer_load` before, `save_kv_layer` after). The connector is there in a step
with staged layers alone, so all other steps take vLLM's way.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pengserve.replicas.engine.block_groups import blocks_of
from pengserve.replicas.engine.vllm_seam import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    get_forward_context,
    kv_transfer_state,
)
from pengserve.replicas.kv.tiered import StepTables, TieredKv


class LayerWaits(KVConnectorBase_V1):
    """What vLLM calls before and after the attention of each layer. It is no connector otherwise."""

    def __init__(self, tiers: TieredKv, names: list[str]) -> None:
        # vLLM's own constructor wants a configuration of transfers between instances.
        self._connector_metadata = KVConnectorMetadata()
        self._tiers = tiers
        self._layers = {name: layer for layer, name in enumerate(names)}

    def wait_for_layer_load(self, layer_name: str) -> None:
        """The layer's KV is on the device when this returns."""
        self._tiers.wait_layer(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The layer's KV has been read."""
        self._tiers.read_layer(self._layers[layer_name])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copies have begun before the forward pass."""

    def wait_for_save(self) -> None:
        """Nothing is saved by layers."""

    def get_num_new_matched_tokens(self, *args: Any) -> tuple[int, bool]:
        """The scheduler's side: no tokens come from elsewhere."""
        return 0, False

    def update_state_after_alloc(self, *args: Any) -> None:
        """The scheduler's side."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """The scheduler's side."""
        return KVConnectorMetadata()


class TierRunner:
    """Wraps `_model_forward` and `execute_model` of one runner."""

    def __init__(self, runner: Any, tiers: TieredKv, names: list[str], block_size: int) -> None:
        """
        Args:
            names: of the attention layers, in order.
            block_size: tokens of the runner's blocks.
        """
        self._runner, self._tiers, self._names, self._block_size = runner, tiers, names, block_size
        self._waits = LayerWaits(tiers, names)
        self._scheduled: dict[str, int] = {}
        self._num_tokens = 0
        self._execute: Callable[..., Any] = runner.execute_model
        self._forward: Callable[..., Any] = runner._model_forward
        runner.execute_model, runner._model_forward = self.execute_model, self.model_forward

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; `model_forward` needs to know how many tokens the step has of each request."""
        self._scheduled = scheduler_output.num_scheduled_tokens
        self._num_tokens = scheduler_output.total_num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            if num_hit := new.num_computed_tokens // self._block_size:
                self._tiers.note_hits(np.array(blocks_of(new.block_ids)[:num_hit]), self._block_size)
        return self._execute(scheduler_output, *args, **kwargs)

    def model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, over tables that say where the KV is."""
        context = get_forward_context()
        if not context.attn_metadata or not self._scheduled:  # vLLM warms up
            return self._forward(*args, **kwargs)
        step = self._begin()
        if step is None:
            return self._forward(*args, **kwargs)
        self._map(context, step)
        if not step.waits:
            return self._forward(*args, **kwargs)
        kv_transfer_state._KV_CONNECTOR_AGENT = self._waits
        try:
            result = self._forward(*args, **kwargs)
        except BaseException:  # another member is gone: this one goes on in `dp`
            self._tiers.end_step(has_failed=True)
            raise
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = None
        self._tiers.end_step()
        return result

    def _begin(self) -> StepTables | None:
        batch, tiers, size = self._runner.input_batch, self._tiers, self._block_size
        count = batch.num_reqs
        starts = batch.num_computed_tokens_cpu[:count]
        if self._num_tokens == count and tiers.placement.is_plain and (starts % size).all():
            return None  # each request writes one token into a block that it has: nothing to look at, a few us a step
        tokens = np.array([self._scheduled[request_id] for request_id in batch.req_ids[:count]])
        tables = batch.block_table[0].get_numpy_array()[:count]
        return tiers.begin_step(tables, -(-(starts + tokens) // size), starts, size)

    def _map(self, context: Any, step: StepTables) -> None:
        """Gives each layer its block table and slot mapping: the ordinary ones, gathered through the step's tables.

        In numpy, which takes a third of torch's time for tables as small as these. Rows that `take` returns are
        contiguous, as vLLM's kernels read them; those of an index are not.
        """
        metadata, size = context.attn_metadata, self._block_size
        first, slots = metadata[self._names[0]], context.slot_mapping[self._names[0]].numpy()
        # A padded entry of the block table is an older block of its row, or 0.
        tables = np.take(step.index, first.block_table.numpy(), axis=1)
        blocks, places = np.divmod(slots, size)
        mapped = np.take(step.index, blocks, axis=1).astype(slots.dtype) * size + places
        mapped[:, slots < 0] = -1
        rows = [_with(first, tables[row], mapped[row]) for row in range(len(tables))]
        for layer, name in enumerate(self._names):
            metadata[name], context.slot_mapping[name] = rows[layer if step.is_layered else 0]


def _with(metadata: Any, block_table: np.ndarray, slot_mapping: np.ndarray) -> tuple[Any, torch.Tensor]:
    own, slots = copy.copy(metadata), torch.from_numpy(slot_mapping)
    own.block_table = torch.from_numpy(block_table)
    own.slot_mapping = slots[: len(metadata.slot_mapping)]
    return own, slots
