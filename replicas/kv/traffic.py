"""Copies under way between device and host, and what the ledgers know of them.

    submit     the copy's cells and rows are IN FLIGHT
    settle     a copy has ended: they are still again, and `then` says in the tables what that means

No block in flight gets another owner: who wants its cell or its row waits for the copy, or cancels it.
"""

from collections.abc import Callable, Iterable

import numpy as np

from pengserve.replicas.kv.copies import Copies, Copy, require_moved
from pengserve.replicas.kv.host_tier import HostRows
from pengserve.replicas.kv.ledger import CellLedger, Cells
from pengserve.replicas.kv.pool import DevicePool

Then = Callable[[Copy], None]


class Traffic:
    """Belongs to the step thread."""

    def __init__(self, engine: Copies, pool: DevicePool, host: HostRows, num_blocks: int) -> None:
        """`num_blocks`: logical ones."""
        self.engine = engine
        self.cells, self.rows = CellLedger(pool.num_cells, "device"), CellLedger(host.most_rows, "host")
        self.in_flight = np.zeros(num_blocks, dtype=np.int32)  # copies of each logical block
        self.copied = np.zeros(num_blocks, dtype=np.int64)  # layers of it that were copied so far, either way
        self._under_way: dict[Copy, Then] = {}
        self._num_expected = 0

    def expect(self, blocks: np.ndarray) -> None:
        """KV comes to blocks from elsewhere: nothing else touches them until it `arrived`."""
        self.in_flight[blocks] += 1
        self._num_expected += len(blocks)

    def arrived(self, blocks: np.ndarray) -> None:
        """Inverse of `expect`."""
        self.in_flight[blocks] -= 1
        self._num_expected -= len(blocks)

    def submit(self, copy: Copy, then: Then, *, follows: bool = False) -> Copy:
        """Begins a copy. Raises ValueError where another one is in the way: a programmer's mistake.

        Args:
            follows: `copy.is_ready` waits for the copies that have its cells before.
        """
        device, host = _device(copy), _host(copy)
        blocked = [] if follows else self.cells.conflicts(device, with_reads=not copy.to_host)
        blocked += self.rows.conflicts(host, with_reads=copy.to_host)
        if blocked:
            raise ValueError(f"{blocked} of layer {copy.layer} are in flight already")
        self.cells.begin_copy(device, writes=not copy.to_host)
        self.rows.begin_copy(host, writes=copy.to_host)
        self.in_flight[copy.blocks] += 1
        self._under_way[copy] = then
        return self.engine.submit(copy)

    def settle(self) -> None:
        """Takes note of the copies that have ended."""
        for copy in self.engine.finished():
            self.cells.end_copy(_device(copy), writes=not copy.to_host)
            self.rows.end_copy(_host(copy), writes=copy.to_host)
            self.in_flight[copy.blocks] -= 1
            if not copy.is_cancelled:
                self.copied[copy.blocks] += 1
            self._under_way.pop(copy)(copy)

    def wait(self, copies: Iterable[Copy]) -> None:
        """Waits until these have ended, and settles.

        Raises:
            HostTierError: one has failed.
        """
        found = list(copies)
        self._wait_over(found)
        require_moved(found)

    def wait_for(self, blocks: np.ndarray, *, coming: bool = False) -> None:
        """Waits until nothing copies any of these blocks; such copies become the most urgent ones.

        Args:
            coming: wait only for what comes to the device.
        """
        if not self._under_way or not self.in_flight[blocks].any():
            return
        found = [
            copy for copy in self._under_way if not (coming and copy.to_host) and np.isin(copy.blocks, blocks).any()
        ]
        self.engine.hurry(found)
        self._wait_over(found)

    def cancel(self, copies: Iterable[Copy]) -> None:
        """Ends copies where they are, and settles."""
        found = [copy for copy in copies if copy in self._under_way]
        for copy in found:
            self.engine.cancel(copy)
        self._wait_over(found)

    def _wait_over(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self.engine.wait(copy)
        self.settle()

    def copies(self) -> list[Copy]:
        """Those under way."""
        return list(self._under_way)

    def check(self) -> tuple[str, ...]:
        """What is wrong, in sentences: what is in flight is what copies under way read and write."""
        expected = sum(len(copy.cells) for copy in self._under_way)
        found = (self.cells.num_in_flight, self.rows.num_in_flight, int(self.in_flight.sum()))
        wrong = [*self.cells.check(), *self.rows.check()]
        if found != (expected, expected, expected + self._num_expected):
            wrong.append(f"copies have {expected} cells in flight, the ledgers and blocks say {found}")
        return tuple(wrong)


def _device(copy: Copy) -> Cells:
    return Cells((0, 1), copy.cells)


def _host(copy: Copy) -> Cells:
    return Cells((copy.layer, copy.layer + 1), copy.rows)
