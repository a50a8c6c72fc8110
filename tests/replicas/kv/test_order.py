"""Copies wait for the device's work that was there before them, over a device whose work ends late."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from pengserve.replicas.kv.copies import Copy, CopyEngine, Priority
from pengserve.replicas.kv.host_tier import HostTier
from pengserve.replicas.kv.pool import DevicePool, seen_twice
from pengserve.replicas.memory.arena.cpu import CpuBackend

BLOCK_BYTES = 4096


class LateDevice:
    """An order whose device does what it is given only when something waits for it."""

    def __init__(self) -> None:
        self._work: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self.num_begun = 0

    def give(self, cells: torch.Tensor) -> None:
        """Work that will add one to all of these cells."""
        self._work.append(cells)

    def mark(self) -> object:
        return len(self._work)

    @contextmanager
    def copying(self, after: object) -> Iterator[None]:
        self.num_begun += 1
        with self._lock:
            while self._work and isinstance(after, int) and after > 0:
                self._work.pop(0).add_(1)
                after -= 1
        yield


def engine_over(order: LateDevice) -> tuple[CopyEngine, DevicePool, HostTier]:
    memory = seen_twice(CpuBackend(huge_pages=False), 2 * 4 * BLOCK_BYTES)
    pool, host = DevicePool(memory, 2, 4, BLOCK_BYTES), HostTier(2, 8, BLOCK_BYTES)
    return CopyEngine(pool, host, order=order), pool, host


def copy_of(cells: list[int], rows: list[int], *, to_host: bool, is_ready: bool = True) -> Copy:
    places = np.array(cells), np.array(rows)
    return Copy(Priority.STAGE, 0, np.array(cells), *places, to_host=to_host, is_ready=is_ready)


def test_a_copy_to_the_host_has_what_was_being_computed() -> None:
    device = LateDevice()
    engine, pool, host = engine_over(device)
    pool.cells.fill_(1)
    device.give(pool.cells[1:3])
    engine.wait(engine.submit(copy_of([1, 2], [5, 6], to_host=True)))
    assert host.memory[0, 5:7].unique().tolist() == [2]
    engine.close()


def test_staged_cells_are_written_after_the_layer_before_has_been_read() -> None:
    """The layer is *told* to be read when the copies are released; the device reads it later."""
    device = LateDevice()
    engine, pool, host = engine_over(device)
    host.memory.fill_(9)
    pool.cells.fill_(1)
    copy = engine.submit(copy_of([3], [0], to_host=False, is_ready=False))
    assert not copy.done.wait(0.05) and device.num_begun == 0
    device.give(pool.cells[3:4])  # in the place of a read: it must find the 1
    engine.release([copy])
    engine.wait(copy)
    assert pool.cells[3].unique().tolist() == [9], "what was computed later would be 10"
    engine.close()
