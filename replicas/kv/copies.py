"""The copy engine between device and host: one thread, bounded pieces, the most urgent copy first.

    STAGE     a layer of the step under way waits for it
    BRING     the KV of a request that will go on
    EVICT     KV leaves the device, because its cell is needed
    BEHIND    full blocks that may leave later: freeing their cells then costs nothing

The engine moves bytes and nothing else. Who may read or write a cell meanwhile is the ledger's business; what a copy
means for the tables, the step thread says when it takes the copy from `finished`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.kv.host_tier import HostTier, copy_runs
from pengserve.replicas.kv.pool import DevicePool

PIECE_BYTES = 1 << 20
WAIT_S = 60.0
_MIN_RUN_BLOCKS = 4  # shorter runs are gathered by index: a call for each costs more than it saves
_MEASURED_BYTES = 64 << 10  # smaller pieces say more about calls than about the link
_FOLLOW = 0.2  # weight of the newest piece in the measured bandwidth


class Priority(IntEnum):
    """What a copy is for; the lower goes first."""

    STAGE = 0
    BRING = 1
    EVICT = 2
    BEHIND = 3


@dataclass(slots=True, eq=False)
class Copy:
    """Blocks of one layer on their way between cells of the device and rows of the host."""

    priority: Priority
    layer: int
    blocks: np.ndarray  # logical; for the caller
    cells: np.ndarray  # [n]
    rows: np.ndarray  # [n]
    to_host: bool
    is_ready: Callable[[], bool] = lambda: True  # whether its cells may be written; `poke` when that changes
    done: threading.Event = field(default_factory=threading.Event)
    is_cancelled: bool = False
    num_moved: int = 0


class CopyEngine:
    """Belongs to the step thread, but for the copies themselves."""

    def __init__(self, pool: DevicePool, host: HostTier, link_bytes_per_s: float = 0.0) -> None:
        """
        Args:
            link_bytes_per_s: copies take at least as long as over a link of this speed; 0: as fast as they can.
        """
        self._pool, self._host, self._link_bytes_per_s = pool, host, link_bytes_per_s
        self._piece_blocks = max(1, PIECE_BYTES // pool.block_bytes)
        self._cells, self._rows = _in_words(pool.cells), _in_words(host.memory)
        self._changed = threading.Condition()
        self._queues: tuple[deque[Copy], ...] = tuple(deque() for _ in Priority)
        self._finished: deque[Copy] = deque()
        self._failure: BaseException | None = None
        self._is_closed = False
        self.bytes_per_s = {True: 0.0, False: 0.0}  # measured, by `to_host`; 0: no copy yet
        self.moved_bytes = {(to_host, priority): 0 for to_host in (True, False) for priority in Priority}
        self.num_runs = {True: 0, False: 0}  # by `to_host`
        self.busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    def submit(self, copy: Copy) -> Copy:
        """Queues a copy."""
        with self._changed:
            self._queues[copy.priority].append(copy)
            self._changed.notify()
        return copy

    def poke(self) -> None:
        """Says that a copy may have become ready."""
        with self._changed:
            self._changed.notify()

    def hurry(self, copies: list[Copy]) -> None:
        """Copies of these become the most urgent ones."""
        with self._changed:
            for copy in copies:
                if copy in self._queues[copy.priority]:
                    self._queues[copy.priority].remove(copy)
                    copy.priority = Priority.STAGE
                    self._queues[Priority.STAGE].append(copy)
            self._changed.notify()

    def cancel(self, copy: Copy) -> None:
        """Ends a copy before its next piece; it comes as a finished one that is cancelled."""
        with self._changed:
            copy.is_cancelled = True
            self._changed.notify()

    def wait(self, copy: Copy) -> None:
        """Waits until a copy is done.

        Raises:
            EngineError: the copy failed, or did not come on for a minute.
        """
        if not copy.done.wait(WAIT_S):
            raise EngineError(f"a copy of {len(copy.cells)} KV blocks of layer {copy.layer} took over {WAIT_S:g} s")
        self._raise()

    def finished(self) -> list[Copy]:
        """Copies that have ended since the last call, in that order.

        Raises:
            EngineError: one failed.
        """
        self._raise()
        found = []
        while self._finished:
            found.append(self._finished.popleft())
        return found

    def seconds_for(self, num_bytes: int, *, to_host: bool) -> float:
        """How long a copy of so many bytes takes at the measured speed; 0.0 before there was one."""
        speed = self.bytes_per_s[to_host] or self._link_bytes_per_s
        return num_bytes / speed if speed else 0.0

    def close(self) -> None:
        """Ends the thread after the piece that it copies."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(WAIT_S)

    def _raise(self) -> None:
        if self._failure is not None:
            raise EngineError(f"copying KV between device and host failed: {self._failure}") from self._failure

    # The thread -------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        copy: Copy | None = None
        try:
            while (copy := self._next()) is not None:
                if not copy.is_cancelled:
                    self._move_piece(copy)
                if copy.is_cancelled or copy.num_moved == len(copy.cells):
                    self._end(copy)
        except BaseException as error:
            self._failure = error
            with self._changed:
                for queue in self._queues:
                    for other in queue:
                        other.done.set()

    def _next(self) -> Copy | None:
        """The most urgent copy that can go on; waits for one. None: the engine is closed."""
        with self._changed:
            while not self._is_closed:
                for queue in self._queues:
                    for copy in queue:
                        if copy.is_cancelled or copy.is_ready():
                            return copy
                self._changed.wait()
            return None

    def _end(self, copy: Copy) -> None:
        with self._changed:
            self._queues[copy.priority].remove(copy)
        self._finished.append(copy)
        copy.done.set()

    @torch.inference_mode()
    def _move_piece(self, copy: Copy) -> None:
        started_s = time.perf_counter()
        part = slice(copy.num_moved, copy.num_moved + self._piece_blocks)
        cells, rows = copy.cells[part], copy.rows[part]
        host = self._rows[copy.layer]
        source, target = (self._cells, host) if copy.to_host else (host, self._cells)
        found = copy_runs(cells, rows) if copy.to_host else copy_runs(rows, cells)
        if len(cells) >= _MIN_RUN_BLOCKS * len(found):
            for first, to, count in found:
                target[to : to + count].copy_(source[first : first + count])
        else:
            froms, tos = (cells, rows) if copy.to_host else (rows, cells)
            picked = source.index_select(0, torch.from_numpy(froms).to(source.device))
            target.index_copy_(0, torch.from_numpy(tos).to(target.device), picked.to(target.device))
        num_bytes = len(cells) * self._pool.block_bytes
        if self._link_bytes_per_s:
            time.sleep(max(0.0, num_bytes / self._link_bytes_per_s - (time.perf_counter() - started_s)))
        copy.num_moved += len(cells)
        self._note(copy, num_bytes, len(found), time.perf_counter() - started_s)

    def _note(self, copy: Copy, num_bytes: int, num_runs: int, took_s: float) -> None:
        self.busy_s += took_s
        self.moved_bytes[copy.to_host, copy.priority] += num_bytes
        self.num_runs[copy.to_host] += num_runs
        if num_bytes >= _MEASURED_BYTES:
            speed, before = num_bytes / max(took_s, 1e-9), self.bytes_per_s[copy.to_host]
            self.bytes_per_s[copy.to_host] = speed if not before else before + _FOLLOW * (speed - before)


def _in_words(memory: torch.Tensor) -> torch.Tensor:
    """The same bytes in units of eight, which index operations move several times as fast."""
    return memory.view(torch.int64) if memory.shape[-1] % 8 == 0 else memory
