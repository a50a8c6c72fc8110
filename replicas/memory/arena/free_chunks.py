"""The free physical chunks, as runs: chunks that lie together are mapped by one call."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence


def runs(chunks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of ascending neighbours in `chunks`: `(index in chunks, first chunk, number of chunks)`."""
    index = 0
    while index < len(chunks):
        stop = index + 1
        while stop < len(chunks) and chunks[stop] == chunks[stop - 1] + 1:
            stop += 1
        yield index, chunks[index], stop - index
        index = stop


class FreeChunks:
    """A set of chunk numbers, kept as sorted runs `[start, stop)` that do not touch."""

    def __init__(self, num_chunks: int) -> None:
        """All of `[0, num_chunks)` is free."""
        self._starts, self._stops = ([0], [num_chunks]) if num_chunks else ([], [])
        self._count = num_chunks

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start, stop in zip(self._starts, self._stops, strict=True):
            yield from range(start, stop)

    def take(self, count: int) -> list[int]:
        """`count` chunks in as few runs as can be: the shortest run that holds them all, else the longest first."""
        if count > self._count:
            raise ValueError(f"{self._count} chunks are free, {count} wanted")
        taken: list[int] = []
        while len(taken) < count:
            missing = count - len(taken)
            sizes = [stop - start for start, stop in zip(self._starts, self._stops, strict=True)]
            index = min(range(len(sizes)), key=lambda i: (sizes[i] < missing, abs(sizes[i] - missing)))
            start = self._starts[index]
            stop = min(start + missing, self._stops[index])
            taken += range(start, stop)
            if stop == self._stops[index]:
                del self._starts[index], self._stops[index]
            else:
                self._starts[index] = stop
        self._count -= count
        return taken

    def give(self, chunks: Iterable[int]) -> None:
        """Adds chunks that are not free, and joins runs that meet."""
        for _, start, count in runs(sorted(chunks)):
            stop = start + count
            index = bisect_left(self._starts, start)
            joins_before = index > 0 and self._stops[index - 1] == start
            joins_after = index < len(self._starts) and self._starts[index] == stop
            if joins_before and joins_after:
                self._stops[index - 1] = self._stops[index]
                del self._starts[index], self._stops[index]
            elif joins_before:
                self._stops[index - 1] = stop
            elif joins_after:
                self._starts[index] = start
            else:
                self._starts.insert(index, start)
                self._stops.insert(index, stop)
            self._count += count
