"""Copies between the device and the host of a pipeline's stage, beside its steps (FastSwitch section 3.2).

    begin      KV goes to the host, or comes from there; its blocks and rows are IN FLIGHT
    wait_for   a microbatch needs blocks: no copy has one of them when this returns
    num_come   swap-ins that have ended, counted from the first on

    a copy           reads     writes    waits for those before it that
    to the host      blocks    rows      write its blocks, or have its rows
    to the device    rows      blocks    have its blocks, or write its rows

The leader numbers swap-ins; all members begin them in that order. A member never trusts the leader's count: it waits
itself for what a microbatch reads or writes, so that a wrong guess costs time and no exactness. Ledgers decide what is
in the way, so that no block and no row that a copy has gets other content.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pengserve.replicas.kv.copies import Copy, CopyEngine, require_moved
from pengserve.replicas.kv.ledger import CellLedger, Cells


@dataclass(slots=True, eq=False)
class _Moving:
    """Some blocks in all layers of the stage."""

    blocks: Sequence[int]  # of the device
    rows: Sequence[int]  # stage rows
    copies: Sequence[Copy]  # one a layer
    to_host: bool
    number: int  # of the swap-in


class StageCopies:
    """Of one stage. Belongs to the step thread."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._moving: list[_Moving] = []
        self._newest = 0  # swap-in
        self._blocks, self._rows = CellLedger(1, "device"), CellLedger(1, "host")

    def __len__(self) -> int:
        self._look()
        return len(self._moving)

    @property
    def num_come(self) -> int:
        """The number of the last swap-in up to which all have ended."""
        self._look()
        return next((moving.number - 1 for moving in self._moving if not moving.to_host), self._newest)

    def begin(
        self, blocks: Sequence[int], rows: Sequence[int], copies: Sequence[Copy], *, to_host: bool, number: int = 0
    ) -> None:
        """Submits copies of blocks from or to these rows, one a layer, once no copy before is in the way.

        Args:
            number: of the swap-in.

        Raises:
            HostTierError: a copy that was in the way has failed.
        """
        read, written = (self._blocks, self._rows) if to_host else (self._rows, self._blocks)
        froms, tos = (_cells(blocks), _cells(rows)) if to_host else (_cells(rows), _cells(blocks))
        if read.conflicts(froms, with_reads=False) or written.conflicts(tos):
            self._wait(self._those_with(blocks, rows))
        read.begin_copy(froms, writes=False)
        written.begin_copy(tos, writes=True)
        for copy in copies:
            self._engine.submit(copy)
        self._moving.append(_Moving(blocks, rows, copies, to_host, number))
        self._newest = self._newest if to_host else number

    def wait_for(self, blocks: Iterable[int]) -> None:
        """Returns when no copy reads or writes any of these blocks.

        Raises:
            HostTierError: a copy has failed.
        """
        if self._moving and self._blocks.conflicts(_cells(found := list(blocks))):
            self._wait(self._those_with(found))

    def wait_all(self) -> None:
        """Returns when no copy is under way; raises as `wait_for` does."""
        self._wait(self._moving)

    def forget(self) -> None:
        """The pipeline has ended: the next one counts from 1 again. What has failed is of no use any more."""
        self._end(self._moving)
        self._newest = 0

    def check(self) -> tuple[str, ...]:
        """What is wrong, in sentences: what is in flight is what copies under way read and write."""
        expected = (sum(len(moving.blocks) for moving in self._moving), sum(len(m.rows) for m in self._moving))
        found = (self._blocks.num_in_flight, self._rows.num_in_flight)
        wrong = () if expected == found else (f"copies have {expected} blocks and rows, the ledgers say {found}",)
        return (*wrong, *self._blocks.check(), *self._rows.check())

    def _those_with(self, blocks: Iterable[int], rows: Iterable[int] = ()) -> list[_Moving]:
        blocks, rows = set(blocks), set(rows)
        return [m for m in self._moving if not (blocks.isdisjoint(m.blocks) and rows.isdisjoint(m.rows))]

    def _look(self) -> None:
        self._wait([moving for moving in self._moving if all(copy.done.is_set() for copy in moving.copies)])

    def _wait(self, found: Sequence[_Moving]) -> None:
        if found:
            self._end(found)
            require_moved(copy for moving in found for copy in moving.copies)

    def _end(self, found: Sequence[_Moving]) -> None:
        """Waits until these are over; they become the most urgent ones."""
        copies = [copy for moving in found for copy in moving.copies]
        if late := [copy for copy in copies if not copy.done.is_set()]:
            self._engine.hurry(late)
        for copy in copies:
            self._engine.wait(copy)
        for moving in found:
            self._blocks.end_copy(_cells(moving.blocks), writes=not moving.to_host)
            self._rows.end_copy(_cells(moving.rows), writes=moving.to_host)
        self._moving = [moving for moving in self._moving if moving not in found]


def _cells(ids: Iterable[int]) -> Cells:
    return Cells((0, 1), list(ids))
