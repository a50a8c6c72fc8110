"""The copy engine between device and host: one thread, bounded pieces, the most urgent copy first.

    STAGE     a layer of the step under way waits for it
    BRING     the KV of a request that will go on
    EVICT     KV leaves the device, because its cell is needed
    BEHIND    full blocks that may leave later: freeing their cells then costs nothing

Where a copy fails the thread ends, and all copies with it: each says why. Callers that need what they carry raise that
(`require_moved`); to others they are as cancelled.

The engine moves bytes and nothing else. Who may read or write a cell meanwhile is the ledger's business; what a copy
means for the tables, the step thread says when it takes the copy from `finished`.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch

from pengserve.planners.types.errors import EngineError, HostTierError, one_line
from pengserve.replicas.kv.host_tier import HostCells, HostTier, copy_runs
from pengserve.replicas.kv.order import Order, order_of
from pengserve.replicas.kv.pool import DevicePool

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
CUDA_PIECE_BYTES = 8 << 20  # a piece is waited for, which costs as much as a megabyte
WAIT_S = 60.0
ASSUMED_BYTES_PER_S = 8e9  # before the first copy: less than any PCIe link of 16 lanes since 2012 has
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
    is_ready: bool = True  # its cells may be written; else `release` says when
    done: threading.Event = field(default_factory=threading.Event)
    after: object = None  # a mark of the device's work that must be done before
    is_cancelled: bool = False
    failure: str = ""  # why it was cancelled, where that is not what its owner wanted
    num_moved: int = 0
    sides: "Sides | None" = None  # other memory than the engine's own pool and host,
    places: np.ndarray | None = None  # ... and where the rows are there


def require_moved(copies: Iterable[Copy]) -> None:
    """Raises HostTierError where one of these copies, which are over, has failed."""
    for copy in copies:
        if copy.failure:
            raise HostTierError(copy.failure)


class Sides(NamedTuple):
    """Memory that a copy's cells and places are in, as `in_words` has it, and the copies that have ended there."""

    device: torch.Tensor  # [n, words of a block]
    host: torch.Tensor
    finished: deque[Copy]


class CopyEngine:
    """Belongs to the step thread, but for the copies themselves."""

    def __init__(
        self, pool: DevicePool, host: HostTier, link_bytes_per_s: float = 0.0, order: Order | None = None
    ) -> None:
        """
        Args:
            link_bytes_per_s: copies take at least as long as over a link of this speed; 0: as fast as they can.
            order: None: what the pool's device needs.
        """
        self._pool, self._host, self._link_bytes_per_s = pool, host, link_bytes_per_s
        self._order = order or order_of(pool.cells.device)
        piece_bytes = CUDA_PIECE_BYTES if pool.cells.is_cuda else PIECE_BYTES
        self._piece_blocks = max(1, piece_bytes // pool.block_bytes)
        self._cells, self._rows = in_words(pool.cells), in_words(host.memory)
        self._changed = threading.Condition()
        self._queues: tuple[deque[Copy], ...] = tuple(deque() for _ in Priority)
        self._finished: deque[Copy] = deque()
        self.failure = ""  # a sentence, once a copy has failed: the thread has ended
        self._is_closed = False
        self.bytes_per_s = {True: 0.0, False: 0.0}  # measured, by `to_host`; 0: no copy yet
        self.moved_bytes = {(to_host, priority): 0 for to_host in (True, False) for priority in Priority}
        self.num_runs = {True: 0, False: 0}  # by `to_host`
        self.busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    def submit(self, copy: Copy) -> Copy:
        """Queues a copy. It begins after what the calling thread has given the device so far."""
        copy.after = self._order.mark()
        with self._changed:
            self._queues[copy.priority].append(copy)
            if self.failure:
                self._end_failed(copy)
            self._changed.notify()
        return copy

    def release(self, copies: Sequence[Copy]) -> None:
        """Copies that were not ready may begin after what the calling thread has given the device so far."""
        mark = self._order.mark()
        with self._changed:
            for copy in copies:
                copy.after, copy.is_ready = mark, True
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
        """Waits until a copy is over; `require_moved` says whether it has failed.

        Raises:
            EngineError: it did not come on for a minute.
        """
        if not copy.done.wait(WAIT_S):
            raise EngineError(f"a copy of {len(copy.cells)} KV blocks of layer {copy.layer} took over {WAIT_S:g} s")

    @property
    def has_news(self) -> bool:
        """Whether `finished` has something to say."""
        return bool(self._finished)

    def finished(self) -> list[Copy]:
        """Copies that have ended since the last call, in that order."""
        found = []
        while self._finished:
            found.append(self._finished.popleft())
        return found

    def speed(self, *, to_host: bool) -> float:
        """Bytes a second: as measured, or the other way, or of the link that was given, or `ASSUMED_BYTES_PER_S`."""
        measured = self.bytes_per_s[to_host] or self.bytes_per_s[not to_host]
        return measured or self._link_bytes_per_s or ASSUMED_BYTES_PER_S

    def close(self) -> None:
        """Ends the thread after the piece that it copies."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(WAIT_S)

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
            logger.exception("copying KV between device and host failed")
            with self._changed:
                self.failure = f"copying KV between device and host failed ({one_line(error)})"
                for other in [other for queue in self._queues for other in queue]:
                    self._end_failed(other)

    def _next(self) -> Copy | None:
        """The most urgent copy that can go on; waits for one. None: the engine is closed."""
        with self._changed:
            while not self._is_closed:
                for queue in self._queues:
                    for copy in queue:
                        if copy.is_cancelled or copy.is_ready:
                            return copy
                self._changed.wait()
            return None

    def _end_failed(self, copy: Copy) -> None:
        copy.is_cancelled, copy.failure = True, self.failure
        self._end(copy)

    def _end(self, copy: Copy) -> None:
        with self._changed:
            self._queues[copy.priority].remove(copy)
        (self._finished if copy.sides is None else copy.sides.finished).append(copy)
        copy.done.set()

    @torch.inference_mode()
    def _move_piece(self, copy: Copy) -> None:
        started_s = time.perf_counter()
        part = slice(copy.num_moved, copy.num_moved + self._piece_blocks)
        cells, rows = copy.cells[part], (copy.rows if copy.places is None else copy.places)[part]
        device, host = copy.sides[:2] if copy.sides is not None else (self._cells, self._rows[copy.layer])
        with self._order.copying(copy.after if not copy.num_moved else None):
            if device.is_cuda:
                num_runs = _move_by_rows(device, host, cells, rows, to_host=copy.to_host)
            else:
                num_runs = _move_by_runs(device, host, cells, rows, to_host=copy.to_host)
        num_bytes = len(cells) * self._pool.block_bytes
        took_s = self._as_over_the_link(num_bytes, started_s)
        copy.num_moved += len(cells)
        self.busy_s += took_s
        self._note(num_bytes, copy.priority, copy.to_host, took_s)
        self.num_runs[copy.to_host] += num_runs

    def _as_over_the_link(self, num_bytes: int, started_s: float) -> float:
        """Waits as long as the emulated link would have taken since; seconds in all."""
        if self._link_bytes_per_s:
            time.sleep(max(0.0, num_bytes / self._link_bytes_per_s - (time.perf_counter() - started_s)))
        return time.perf_counter() - started_s

    def _note(self, num_bytes: int, priority: Priority, to_host: bool, took_s: float) -> None:
        self.moved_bytes[to_host, priority] += num_bytes
        if num_bytes >= _MEASURED_BYTES:
            speed, before = num_bytes / max(took_s, 1e-9), self.bytes_per_s[to_host]
            self.bytes_per_s[to_host] = speed if not before else before + _FOLLOW * (speed - before)


class Copies(Protocol):
    """What those that copy need of an engine."""

    @property
    def failure(self) -> str:
        """A sentence, once a copy has failed."""

    @property
    def has_news(self) -> bool:
        """Whether `finished` has something to say."""

    @property
    def moved_bytes(self) -> Mapping[tuple[bool, Priority], int]:
        """In all, by `to_host` and priority."""

    def submit(self, copy: Copy) -> Copy:
        """Queues a copy."""

    def release(self, copies: Sequence[Copy]) -> None:
        """Copies that were not ready may begin."""

    def hurry(self, copies: list[Copy]) -> None:
        """Copies of these become the most urgent ones."""

    def cancel(self, copy: Copy) -> None:
        """Ends a copy."""

    def wait(self, copy: Copy) -> None:
        """Waits until a copy is over."""

    def finished(self) -> list[Copy]:
        """Copies that have ended since the last call."""

    def speed(self, *, to_host: bool) -> float:
        """Bytes a second."""

    def close(self) -> None:
        """Ends all."""


class CopiesBetween:
    """Copies of an engine between another pool and another host: one thread and one link serve both.

    To who uses it, it is an engine of its own. Belongs to the step thread.
    """

    def __init__(self, engine: Copies, pool: DevicePool, host: HostCells) -> None:
        self._engine, self._host = engine, host
        self._sides = Sides(in_words(pool.cells), in_words(host.cells), deque())

    def submit(self, copy: Copy) -> Copy:
        """As of the engine."""
        copy.sides, copy.places = self._sides, self._host.at(copy.layer, copy.rows)
        return self._engine.submit(copy)

    @property
    def has_news(self) -> bool:
        """As of the engine, of these copies."""
        return bool(self._sides.finished)

    def finished(self) -> list[Copy]:
        """As of the engine, of these copies."""
        return [self._sides.finished.popleft() for _ in range(len(self._sides.finished))]

    def release(self, copies: Sequence[Copy]) -> None:
        """As of the engine."""
        self._engine.release(copies)

    def hurry(self, copies: list[Copy]) -> None:
        """As of the engine."""
        self._engine.hurry(copies)

    def cancel(self, copy: Copy) -> None:
        """As of the engine."""
        self._engine.cancel(copy)

    def wait(self, copy: Copy) -> None:
        """As of the engine."""
        self._engine.wait(copy)

    def speed(self, *, to_host: bool) -> float:
        """As of the engine."""
        return self._engine.speed(to_host=to_host)

    def close(self) -> None:
        """The engine is another's to close."""

    @property
    def failure(self) -> str:
        """As of the engine."""
        return self._engine.failure

    @property
    def moved_bytes(self) -> Mapping[tuple[bool, Priority], int]:
        """As of the engine, all of its copies counted."""
        return self._engine.moved_bytes


def in_words(memory: torch.Tensor) -> torch.Tensor:
    """The same bytes in units of eight, which index operations move several times as fast."""
    return memory.view(torch.int64) if memory.shape[-1] % 8 == 0 else memory


def _move_by_runs(
    device: torch.Tensor, host: torch.Tensor, cells: np.ndarray, rows: np.ndarray, *, to_host: bool
) -> int:
    """Copies in runs of neighbours on both sides, or all at once by index where these are short; how many runs."""
    source, target = (device, host) if to_host else (host, device)
    froms, tos = (cells, rows) if to_host else (rows, cells)
    runs = copy_runs(froms, tos)
    if len(cells) >= _MIN_RUN_BLOCKS * len(runs):
        for first, to, count in runs:
            target[to : to + count].copy_(source[first : first + count])
    else:
        target.index_copy_(0, torch.from_numpy(tos), source.index_select(0, torch.from_numpy(froms)))
    return len(runs)


def _move_by_rows(
    device: torch.Tensor, host: torch.Tensor, cells: np.ndarray, rows: np.ndarray, *, to_host: bool
) -> int:
    """Copies in runs of the host's rows; how many. A device gathers and scatters its cells in next to no time."""
    index = torch.from_numpy(cells).to(device.device)
    runs = copy_runs(rows, np.arange(len(rows)))
    if to_host:
        packed = device.index_select(0, index)
        for row, first, count in runs:
            host[row : row + count].copy_(packed[first : first + count], non_blocking=True)
    else:
        packed = device.new_empty(len(rows), device.shape[1])
        for row, first, count in runs:
            packed[first : first + count].copy_(host[row : row + count], non_blocking=True)
        device.index_copy_(0, index, packed)
    return len(runs)
