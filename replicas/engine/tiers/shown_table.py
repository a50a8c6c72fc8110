"""The block table that vLLM's kernels read, where a host tier decides where blocks are.

vLLM's runner keeps the blocks of its batch twice: `np` follows the scheduler, and `gpu` is what kernels read, written
from it before each step (`commit_block_table`). Here the first has logical blocks, and the second their places:

    as the step before    the same requests decode, none begins a block, nothing has moved: nothing is written
    a block more          the same, but some begin a block that finds a place: its entry is written
    else                  `TieredKv.begin_step` looks at all blocks, and all entries are written

A step whose layers have tables of their own gets logical blocks, and `TierRunner` maps them for each layer. Unless
KV is staged for it, the steps after it may be as it was.
"""

from typing import Any

import numpy as np
import torch

from pengserve.replicas.kv.tiered import StepTables, TieredKv


class ShownTable:
    """Of one runner's batch. Belongs to the step thread."""

    def __init__(self, batch: Any, tiers: TieredKv, block_size: int) -> None:
        """
        Args:
            batch: vLLM's `InputBatch`, of one KV group.
            block_size: tokens of its blocks.
        """
        self.batch, self._tiers, self._block_size = batch, tiers, block_size
        buffer = batch.block_table[0].block_table
        self._logical: np.ndarray = buffer.np
        with torch.inference_mode(mode=False):
            self._shown = torch.zeros_like(buffer.cpu, pin_memory=buffer.gpu.is_cuda)
        self._device: torch.Tensor | None = None
        if buffer.gpu.is_cuda:
            self._device = buffer.gpu
        else:
            buffer.gpu = self._shown  # vLLM has one tensor for both on CPUs
        self.places: np.ndarray = self._shown.numpy()
        batch.block_table.commit_block_table = self.commit
        self.step: StepTables | None = None  # of the step under way, where layers have tables of their own
        self._lasting: StepTables | None = None  # as it was for the newest step, without what was staged for it
        self.num_read = 0  # blocks of the request that reads most of them in it
        self._tokens: dict[str, int] = {}  # of the step, by request
        self._is_decode = False  # it computes one token of each request that the step before had, or might have had
        self._ids: list[str] = []  # of the batch, whose places are shown, in its order; empty: not to be relied on
        self._version = -1  # of the placement that is shown
        self._num_still = 0  # steps of decoding until one of these requests begins a block
        self._is_mapped = False  # some of the places are not the logical blocks

    def expect(self, tokens: dict[str, int], *, is_decode: bool) -> None:
        """The next step computes so many tokens of each request.

        Args:
            is_decode: one each, of requests that have kept their blocks if they were in the step before.
        """
        self._tokens, self._is_decode, self.step = tokens, is_decode, None

    def commit(self, num_reqs: int) -> None:
        """As vLLM's: the table is right for the step that comes.

        Raises:
            EngineError: a copy failed, or the device does not hold what the step needs at once.
        """
        self._tiers.settle()
        is_known = self._is_decode and self._ids == self.batch.req_ids
        if is_known and self._version == self._tiers.placement.version:
            self.step = self._lasting
            if self._num_still:
                self._num_still -= 1
                self._tiers.note_step(is_mapped=self._is_mapped)
                return
            if self._show_begun(num_reqs):
                return
        self._ids, self.step, self._lasting = [], None, None
        self._show_all(num_reqs)

    def _show_begun(self, num_reqs: int) -> bool:
        """Shows the blocks that begin with this step; whether each has a place that can be shown."""
        starts = self.batch.num_computed_tokens_cpu[:num_reqs]
        rows = np.flatnonzero(starts % self._block_size == 0)
        columns = starts[rows] // self._block_size
        blocks = self._logical[rows, columns]
        if not self._tiers.begin_blocks(blocks, is_layered=self._lasting is not None):
            return False
        self.num_read = max(self.num_read, int(columns.max()) + 1)
        places = blocks if self._lasting is not None else self._tiers.placement.index[0, blocks]
        self.places[rows, columns] = places
        self._is_mapped = self._is_mapped or bool((places != blocks).any())
        self._tiers.note_step(is_mapped=self._is_mapped)
        self._rely_on(self._ids, starts + 1)
        self._send(num_reqs)
        return True

    def _show_all(self, num_reqs: int) -> None:
        batch, size = self.batch, self._block_size
        starts = batch.num_computed_tokens_cpu[:num_reqs]
        stops = starts + np.array([self._tokens[request_id] for request_id in batch.req_ids[:num_reqs]])
        counts = -(-stops // size)
        step = self._tiers.begin_step(self._logical[:num_reqs], counts, starts, size)
        self.num_read = int(counts.max())
        if step is not None and step.is_layered:
            self.step = step
            self.places[:num_reqs] = self._logical[:num_reqs]  # whole rows: a GPU gathers these
            self._lasting = None if step.waits else step
        else:
            blocks = self._logical[:num_reqs, : self.num_read]
            self.places[:num_reqs, : self.num_read] = blocks if step is None else step.index[0][blocks]
        self._is_mapped = step is not None
        if step is None or not step.waits:
            self._rely_on(list(batch.req_ids), stops)
        self._send(num_reqs)

    def _rely_on(self, ids: list[str], starts: np.ndarray) -> None:
        """What is shown is right until something moves; the next step begins at these tokens."""
        self._ids, self._version = ids, self._tiers.placement.version
        self._num_still = int((-starts % self._block_size).min())

    def _send(self, num_reqs: int) -> None:
        if self._device is not None:
            self._device[:num_reqs].copy_(self._shown[:num_reqs], non_blocking=True)
