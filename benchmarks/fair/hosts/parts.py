"""Leaves parts of switching out of an instance, and runs it."""

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.fair.hosts.call_times import count
from pengserve.replicas import host
from pengserve.replicas.engine.tiers.lane_tiers import LaneTiers
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from pengserve.replicas.kv import copies
from pengserve.replicas.kv.tiered import TieredKv

_write, _bring, _end_step = LaneTiers.write_behind, LaneTiers.bring, TieredKv.end_step


def run(*, is_async: bool, runs: bool, reuse: bool) -> int:
    """`pengserve.replicas.host` with these parts; its exit status."""
    if not runs:
        copies._move_by_runs = copies._move_by_rows = move_by_blocks
    if not reuse:
        LaneTiers.bring, TieredKv.end_step = bring_and_forget, end_step_and_forget  # type: ignore[method-assign]
    if not is_async:
        _make_wait()
    count()
    return host.main()


def move_by_blocks(
    device: torch.Tensor, host: torch.Tensor, cells: np.ndarray, rows: np.ndarray, *, to_host: bool
) -> int:
    """Copies each block by itself; how many."""
    for cell, row in zip(cells.tolist(), rows.tolist(), strict=True):
        source, target = (device[cell], host[row]) if to_host else (host[row], device[cell])
        target.copy_(source, non_blocking=True)
    return len(cells)


def bring_and_forget(self: LaneTiers, blocks: Sequence[int], keep: Sequence[int]) -> bool:
    """As `LaneTiers.bring`; what is on the device in all layers is not on the host any more."""
    is_coming = _bring(self, blocks, keep)
    if not is_coming:
        _forget(self.tiers, self.physical(blocks))
    return is_coming


def end_step_and_forget(self: TieredKv, *, has_failed: bool = False) -> None:
    """As `TieredKv.end_step`; what was staged and stays is not on the host any more."""
    step = self._current
    _end_step(self, has_failed=has_failed)
    if step is not None and step.staged:
        _forget(self, np.unique(np.concatenate([blocks for _, blocks, _ in step.staged])))


def _forget(tiers: TieredKv, blocks: np.ndarray) -> None:
    is_here = (tiers.placement.index[:, blocks] != 0).all(axis=0)
    tiers.placement.free_rows(blocks[is_here & (tiers.traffic.in_flight[blocks] == 0)])


def _make_wait() -> None:
    """A step waits for copies of requests that give way or go on. Nothing is copied before a request gives way."""
    bring = LaneTiers.bring

    def write_and_wait(self: LaneTiers, blocks: Sequence[int]) -> None:
        _write(self, blocks)
        _wait(self)

    def bring_and_wait(self: LaneTiers, blocks: Sequence[int], keep: Sequence[int]) -> bool:
        if bring(self, blocks, keep):
            _wait(self)
            bring(self, blocks, keep)  # they are there
        return False

    LaneTiers.write_behind, LaneTiers.bring = write_and_wait, bring_and_wait  # type: ignore[method-assign]
    ResidentRequests._write_behind = lambda self: None  # type: ignore[method-assign]


def _wait(lane: LaneTiers) -> None:
    traffic = lane.tiers.traffic
    traffic.wait(traffic.copies())
