"""Which controller an instance obeys: the one of the highest term that has called it."""

import threading

from pengserve.planners.types.errors import FenceError


class TermFence:
    """Remembers the highest term. Calls come from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.newest = 0  # 0: no controller has called yet

    def hear(self, term: int) -> None:
        """A controller of `term` asks: harmless, whichever it is."""
        with self._lock:
            self.newest = max(self.newest, term)

    def require(self, term: int) -> None:
        """A controller of `term` orders; 0 is a caller without a term, such as a test.

        Raises:
            FenceError: a newer controller has called before.
        """
        self.hear(term)
        if 0 < term < self.newest:
            raise FenceError(f"the order is of controller term {term}, and term {self.newest} has taken over")
