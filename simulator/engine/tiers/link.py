"""The link between a device and its host in virtual time: what `replicas.kv.copies.CopyEngine` is with real bytes.

Each way carries one copy at a time, the most urgent first; both ways go at once, as PCIe and NVLink-C2C do. Staged
layers go before all others. The clock of the link runs ahead of the lane's where a step waits for a copy.
"""

from collections.abc import Callable, Iterable

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.kv.copies import Copy, Priority

ROUNDING_S = 1e-12  # what is left of a copy by rounding is nothing


class VirtualLink:
    """Stands in for a `CopyEngine`. Belongs to one lane."""

    def __init__(self, block_bytes: int, bytes_per_s: float, clock: Callable[[], float]) -> None:
        """
        Args:
            block_bytes: of one block in one layer.
            bytes_per_s: of each way.
            clock: virtual seconds.
        """
        self.now_s = 0.0
        self.block_bytes, self.rate = block_bytes, bytes_per_s
        self.bytes_per_s = {True: bytes_per_s, False: bytes_per_s}
        self.moved_bytes = {(to_host, priority): 0 for to_host in (True, False) for priority in Priority}
        self._clock = clock
        self._queues: dict[bool, list[Copy]] = {True: [], False: []}  # by `to_host`
        self._left_bytes: dict[Copy, float] = {}
        self._at_s = {True: 0.0, False: 0.0}  # until when each way has been worked out
        self._finished: list[Copy] = []

    # As `CopyEngine` --------------------------------------------------------------------------------------------------

    def submit(self, copy: Copy) -> Copy:
        """Queues a copy."""
        self.catch_up()
        self._queues[copy.to_host].append(copy)
        self._left_bytes[copy] = float(len(copy.cells) * self.block_bytes)
        return copy

    def release(self, copies: Iterable[Copy]) -> None:
        """Nothing: staged layers are priced as a whole, see `take_staged`."""

    def hurry(self, copies: Iterable[Copy]) -> None:
        """These go before all others."""
        for copy in copies:
            copy.priority = Priority.STAGE

    def cancel(self, copy: Copy) -> None:
        """Ends a copy where it is."""
        self.catch_up()
        if copy in self._left_bytes:
            copy.is_cancelled = True
            self._end(copy)

    def wait(self, copy: Copy) -> None:
        """The clock goes on to the end of this copy. Raises EngineError where it can never begin."""
        self.catch_up()
        while not copy.done.is_set():
            if not self._advance(copy.to_host, float("inf")):
                raise EngineError(f"a copy of layer {copy.layer} waits for one that never ends")
            self.now_s = max(self.now_s, self._at_s[copy.to_host])
        self.catch_up()

    def finished(self) -> list[Copy]:
        """Copies that have ended since the last call, in that order."""
        self.catch_up()
        found, self._finished = self._finished, []
        return found

    def close(self) -> None:
        """Nothing is left to end."""

    # Virtual time -----------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Works out what has been copied by now."""
        self.now_s = max(self.now_s, self._clock())
        for to_host in (True, False):
            while self._at_s[to_host] < self.now_s and self._advance(to_host, self.now_s):
                pass
            self._at_s[to_host] = max(self._at_s[to_host], self.now_s)

    def take_staged(self, copies: Iterable[Copy]) -> None:
        """These were staged within a step, whose stalls are priced elsewhere; the way is theirs for as long."""
        num_bytes = 0.0
        for copy in copies:
            num_bytes += self._left_bytes[copy]
            self._end(copy)
        self._at_s[False] = max(self._at_s[False], self.now_s) + num_bytes / self.rate

    def next_end_s(self) -> float | None:
        """When the copy under way that ends first has ended; None where nothing is copied."""
        heads = [copy for copy in (self._head(True), self._head(False)) if copy is not None]
        ends = [self._at_s[copy.to_host] + self._left_bytes[copy] / self.rate for copy in heads]
        return min(ends, default=None)

    def go_on_to(self, at_s: float) -> None:
        """The clock goes on, because nothing can be stepped before."""
        self.now_s = max(self.now_s, at_s)
        self.catch_up()

    def _head(self, to_host: bool) -> Copy | None:
        return min(self._queues[to_host], key=lambda copy: copy.priority, default=None)

    def _advance(self, to_host: bool, until_s: float) -> bool:
        """Goes on with the most urgent copy of one way, to its end or until then; False where there is none."""
        copy = self._head(to_host)
        if copy is None:
            return False
        left, room_s = self._left_bytes[copy], until_s - self._at_s[to_host]
        if left / self.rate <= room_s + ROUNDING_S:
            self._at_s[to_host] += left / self.rate
            self._end(copy)
        else:
            self._left_bytes[copy] = left - room_s * self.rate
            self._at_s[to_host] = until_s
        return True

    def _end(self, copy: Copy) -> None:
        self._queues[copy.to_host].remove(copy)
        left = self._left_bytes.pop(copy)
        whole = len(copy.cells) * self.block_bytes
        self.moved_bytes[copy.to_host, copy.priority] += round(whole - left) if copy.is_cancelled else whole
        copy.num_moved = len(copy.cells)
        copy.done.set()
        self._finished.append(copy)
