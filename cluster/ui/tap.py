"""Time to first token of this ingress's requests, kept while a page is open."""

from collections import deque
from collections.abc import Sequence
from statistics import quantiles
from typing import Any, Protocol

MAX_KEPT = 4096  # first tokens between two looks


class FirstTokenSource(Protocol):
    """What tells of first tokens: the ingress's meters."""

    on_first_tokens: Any


class FirstTokens:
    """A `Tap` of the feed: seconds until the first tokens since the last look."""

    def __init__(self, source: FirstTokenSource) -> None:
        self._source = source
        self._seconds: deque[float] = deque(maxlen=MAX_KEPT)

    def open(self) -> None:
        """Measures from now on."""
        self._source.on_first_tokens = self._note

    def read(self) -> dict[str, Any]:
        """How many first tokens there were since the last call, and after how many seconds half and 99 % of them."""
        seconds = list(self._seconds)
        self._seconds.clear()
        if not seconds:
            return {"first_tokens": 0, "ttft_p50_s": None, "ttft_p99_s": None}
        cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else seconds * 99
        return {"first_tokens": len(seconds), "ttft_p50_s": round(cuts[49], 4), "ttft_p99_s": round(cuts[98], 4)}

    def close(self) -> None:
        """Measures nothing any more."""
        self._source.on_first_tokens = None
        self._seconds.clear()

    def _note(self, seconds: Sequence[float]) -> None:
        self._seconds.extend(seconds)
