"""What this ingress's clients get, kept while a page is open: time to first token, and SLOs kept by class."""

from collections import deque
from collections.abc import Sequence
from statistics import quantiles
from typing import Any, Protocol

MAX_KEPT = 4096  # first tokens between two looks
RECENT = 200  # newest answers of a class that its attainment is of
MAX_CLASSES = 16


class TrafficSource(Protocol):
    """What tells of first tokens and of answers: the ingress's meters."""

    on_first_tokens: Any
    on_slo: Any


class TrafficTap:
    """A `Tap` of the feed."""

    def __init__(self, source: TrafficSource) -> None:
        self._source = source
        self._seconds: deque[float] = deque(maxlen=MAX_KEPT)
        self._kept: dict[str, deque[bool]] = {}  # by class

    def open(self) -> None:
        """Measures from now on."""
        self._source.on_first_tokens, self._source.on_slo = self._seconds.extend, self._note_slo

    def read(self) -> dict[str, Any]:
        """Since the last call: how many first tokens, and after how many seconds half and 99 % of them. Of each class
        the share of its newest answers that kept their SLO, and how many these are.
        """
        seconds = list(self._seconds)
        self._seconds.clear()
        return _first_tokens(seconds) | {
            "classes": {
                name: {"kept": round(sum(kept) / len(kept), 4), "answers": len(kept)}
                for name, kept in sorted(self._kept.items())
            }
        }

    def close(self) -> None:
        """Measures nothing any more."""
        self._source.on_first_tokens = self._source.on_slo = None
        self._seconds.clear()
        self._kept.clear()

    def _note_slo(self, service_class: str, is_kept: bool) -> None:
        if service_class in self._kept or len(self._kept) < MAX_CLASSES:
            self._kept.setdefault(service_class, deque(maxlen=RECENT)).append(is_kept)


def _first_tokens(seconds: Sequence[float]) -> dict[str, Any]:
    if not seconds:
        return {"first_tokens": 0, "ttft_p50_s": None, "ttft_p99_s": None}
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [*seconds] * 99
    return {"first_tokens": len(seconds), "ttft_p50_s": round(cuts[49], 4), "ttft_p99_s": round(cuts[98], 4)}
