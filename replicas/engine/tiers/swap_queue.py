"""What the members of a pipeline copy before its next microbatch, in order; and what of it has come."""

from collections.abc import Sequence

from pengserve.replicas.kv.stage_rows import Swap


class SwapQueue:
    """Of a pipeline's leader."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """The pipeline has ended."""
        self._swaps: list[Swap] = []
        self._saves: dict[int, int] = {}  # of one swap that is not complete: by row, the block whose KV goes to it
        self.num_begun = 0  # swap-ins
        self.num_come = 0  # swap-ins whose KV is on all members, from the first on

    def save(self, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """KV of blocks goes to these rows. What was to go to one of them before is of no use any more."""
        for block, row in zip(blocks, rows, strict=True):
            self._saves.pop(row, None)
            self._saves[row] = block

    def bring(self, blocks: Sequence[int], rows: Sequence[int]) -> int:
        """KV of rows comes to these blocks; the number of the swap-in, or of the last one where there are no blocks."""
        self._close()
        if blocks:
            self.num_begun += 1
            self._swaps.append(Swap(blocks, rows, to_host=False, number=self.num_begun))
        return self.num_begun

    def take(self) -> list[Swap]:
        """All since the last call."""
        self._close()
        found, self._swaps = self._swaps, []
        return found

    def _close(self) -> None:
        if self._saves:
            self._swaps.append(Swap(list(self._saves.values()), list(self._saves), to_host=True))
            self._saves = {}
