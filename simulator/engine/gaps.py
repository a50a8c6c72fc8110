"""How long streams waited between tokens: a histogram that takes thousands of equal gaps at once."""

from bisect import bisect_right
from collections.abc import Callable

from pengserve.simulator.result import Gaps

FIRST_S, LAST_S = 1e-4, 1e3  # shorter and longer gaps are counted in the first and the last bin
PER_DECADE = 64  # bins are 3.7 % wide
_NUM_BINS = 7 * PER_DECADE
EDGES_S = tuple(FIRST_S * 10 ** (index / PER_DECADE) for index in range(_NUM_BINS + 1))


class GapCounter:
    """Counts gaps of a whole simulation; lanes share one."""

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BINS
        self._bin, self._start_s, self._stop_s = 0, 0.0, 0.0  # of the gap before

    def add(self, gap_s: float, count: int = 1) -> None:
        """Counts `count` gaps of `gap_s` seconds."""
        if not self._start_s <= gap_s < self._stop_s:
            self._bin = min(max(bisect_right(EDGES_S, gap_s) - 1, 0), _NUM_BINS - 1)
            self._start_s, self._stop_s = EDGES_S[self._bin], EDGES_S[self._bin + 1]
        self._counts[self._bin] += count

    def add_rising(self, gap_s: Callable[[int], float], start: int, stop: int, count: int = 1) -> None:
        """Counts gaps `gap_s(i)` for i in `[start, stop)`, which do not fall; asks for a few of them alone."""
        while start < stop:
            first_s = gap_s(start)
            self.add(first_s, 0)
            limit_s = self._stop_s if first_s < self._stop_s else LAST_S * 10
            if gap_s(stop - 1) < limit_s:
                end = stop
            else:
                end = bisect_right(range(start + 1, stop), False, key=lambda index: gap_s(index) >= limit_s) + start + 1
            self._counts[self._bin] += count * (end - start)
            start = end

    def gaps(self) -> Gaps:
        """The histogram so far."""
        return Gaps(edges_s=EDGES_S, counts=tuple(self._counts))
