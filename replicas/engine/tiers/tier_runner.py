"""vLLM's runner over tiers: before each step, a block table that says where the KV is; in it, waiting for layers.

vLLM's own seams are used: the block table that kernels read is written before each step (`shown_table.py`). Where
layers have tables of their own, `_model_forward`, which runs within the forward context, hands them out, and the calls
around each attention that vLLM makes for KV connectors (`wait_for_layer_load` before, `save_kv_layer` after) wait. The
connector is there in a step with staged layers alone, so all other steps take vLLM's way.
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pengserve.replicas.engine.scheduling.block_groups import blocks_of
from pengserve.replicas.engine.tiers.shown_table import ShownTable
from pengserve.replicas.engine.vllm_seam import (
    CUDAGraphMode,
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
    """Wraps `_model_forward`, `execute_model` and the block table of one runner."""

    def __init__(self, runner: Any, tiers: TieredKv, names: list[str], block_size: int) -> None:
        """
        Args:
            names: of the attention layers, in order.
            block_size: tokens of the runner's blocks.
        """
        self._runner, self._tiers, self._names, self._block_size = runner, tiers, names, block_size
        self._waits = LayerWaits(tiers, names)
        self._shown: ShownTable | None = None  # vLLM may make its batch anew until the first step
        self._execute: Callable[..., Any] = runner.execute_model
        self._forward: Callable[..., Any] = runner._model_forward
        runner.execute_model, runner._model_forward = self.execute_model, self.model_forward

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; the table of blocks needs to know how many tokens the step has of each request."""
        tokens, new = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_new_reqs
        is_decode = scheduler_output.total_num_scheduled_tokens == len(tokens) and not new
        is_decode = is_decode and not scheduler_output.scheduled_cached_reqs.resumed_req_ids
        self._shown_table().expect(tokens, is_decode=is_decode)
        for request in new:
            if num_hit := request.num_computed_tokens // self._block_size:
                self._tiers.note_hits(np.array(blocks_of(request.block_ids)[:num_hit]), self._block_size)
        for request_id in scheduler_output.finished_req_ids:
            if (state := self._runner.requests.get(request_id)) is not None:
                self._tiers.touch(np.array(blocks_of(state.block_ids), dtype=np.int64))
        return self._execute(scheduler_output, *args, **kwargs)

    def _shown_table(self) -> ShownTable:
        if self._shown is None or self._shown.batch is not self._runner.input_batch:
            self._shown = ShownTable(self._runner.input_batch, self._tiers, self._block_size)
        return self._shown

    def model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; where layers have tables of their own, over these."""
        shown = self._shown
        if shown is None or shown.step is None:
            return self._forward(*args, **kwargs)
        step, shown.step = shown.step, None
        self._map(get_forward_context(), step, shown.num_read)
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

    def _map(self, context: Any, step: StepTables, num_read: int) -> None:
        """Gives each layer its block table and slot mapping: the ordinary ones, gathered through the step's tables.

        Args:
            num_read: blocks of the request that reads most of them.
        """
        first, slots = context.attn_metadata[self._names[0]], context.slot_mapping[self._names[0]]
        if slots.is_cuda:
            tables, mapped = gathered_on_device(step.index, first.block_table, slots, self._block_size)
            if context.cudagraph_runtime_mode is CUDAGraphMode.FULL:  # a captured graph reads one table
                context.cudagraph_runtime_mode = CUDAGraphMode.NONE
        else:
            blocks = first.block_table.numpy()[:, :num_read]
            found = gathered(step.index, blocks, slots.numpy(), self._block_size)
            tables, mapped = (torch.from_numpy(part) for part in found)
        for layer, name in enumerate(self._names):
            own = copy.copy(first)
            own.block_table, own.slot_mapping = tables[layer], mapped[layer][: len(first.slot_mapping)]
            context.attn_metadata[name], context.slot_mapping[name] = own, mapped[layer]


def gathered(
    index: np.ndarray, tables: np.ndarray, slots: np.ndarray, block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Block tables `[rows, requests, n]` and slots `[rows, tokens]` as `index`, `[rows, logical]`, says for each row.

    In numpy, which takes a third of torch's time for tables as small as these. Rows that `take` returns are contiguous,
    as vLLM's kernels read them; those of an index are not. A padded entry of a table is an older block, or 0.
    """
    blocks, places = np.divmod(slots, block_size)
    mapped = np.take(index, blocks, axis=1).astype(slots.dtype) * block_size + places
    mapped[:, slots < 0] = -1
    return np.take(index, tables, axis=1), mapped


def gathered_on_device(
    index: np.ndarray, tables: torch.Tensor, slots: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `gathered`, of tables and slots that are on a device."""
    rows = torch.from_numpy(index).to(tables.device)
    found = rows.index_select(1, tables.flatten()).view(len(rows), *tables.shape)
    blocks = torch.div(slots, block_size, rounding_mode="floor").clamp_(min=0)
    mapped = rows.index_select(1, blocks).to(slots.dtype) * block_size + slots % block_size
    return found, torch.where(slots < 0, -1, mapped)
