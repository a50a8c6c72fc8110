"""KV that comes from the host beside the steps of a pipeline's stage (FastSwitch section 3.2: asynchronous swap-in).

    begin      a swap-in's copies are under way
    wait_for   a microbatch, or another copy, needs blocks or rows of one: it has ended when this returns
    num_come   swap-ins that have ended, counted from the first on

The leader numbers swap-ins; all members begin them in that order. A member never trusts the leader's count: it waits
itself for what a microbatch reads or writes, so that a wrong guess costs time and no exactness.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pengserve.replicas.kv.copies import Copy, CopyEngine, require_moved


@dataclass(slots=True, eq=False)
class _Coming:
    number: int
    blocks: frozenset[int]  # of the device
    rows: frozenset[int]  # stage rows
    copies: Sequence[Copy]  # one a layer


class Arrivals:
    """Of one stage. Belongs to the step thread."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine
        self._coming: list[_Coming] = []
        self._newest = 0

    def __len__(self) -> int:
        self._look()
        return len(self._coming)

    @property
    def num_come(self) -> int:
        """The number of the last swap-in up to which all have ended."""
        self._look()
        return self._coming[0].number - 1 if self._coming else self._newest

    def begin(self, number: int, blocks: Iterable[int], rows: Iterable[int], copies: Sequence[Copy]) -> None:
        """Submits the copies of a swap-in. The caller has waited for its blocks."""
        for copy in copies:
            self._engine.submit(copy)
        self._coming.append(_Coming(number, frozenset(blocks), frozenset(rows), copies))
        self._newest = number

    def wait_for(self, blocks: Iterable[int] = (), rows: Iterable[int] = ()) -> None:
        """Returns when no copy reads any of these rows, or writes any of these blocks.

        Raises:
            HostTierError: a copy has failed.
        """
        if self._coming:
            blocks, rows = set(blocks), set(rows)
            self._wait([c for c in self._coming if not (c.blocks.isdisjoint(blocks) and c.rows.isdisjoint(rows))])

    def wait_all(self) -> None:
        """As `wait_for`, for all."""
        self._wait(self._coming)

    def forget(self) -> None:
        """The pipeline has ended: the next one counts from 1 again. What has failed is of no use any more."""
        self._wait_over(self._coming)
        self._coming, self._newest = [], 0

    def _wait(self, found: Sequence[_Coming]) -> None:
        self._wait_over(found)
        self._coming = [coming for coming in self._coming if coming not in found]
        require_moved(copy for coming in found for copy in coming.copies)

    def _wait_over(self, found: Sequence[_Coming]) -> None:
        copies = [copy for coming in found for copy in coming.copies]
        if late := [copy for copy in copies if not copy.done.is_set()]:
            self._engine.hurry(late)
        for copy in copies:
            self._engine.wait(copy)

    def _look(self) -> None:
        self._wait([coming for coming in self._coming if all(copy.done.is_set() for copy in coming.copies)])
