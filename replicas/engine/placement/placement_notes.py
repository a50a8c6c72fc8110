"""The newest changes of placements on this instance, for its status."""

import threading
from dataclasses import replace

from pengserve.planners.types.placements import PlacementNote

MOST_KEPT = 16  # between two status calls; of more, the oldest are not told


class PlacementNotes:
    """Of all lanes. The step thread adds, any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: tuple[PlacementNote, ...] = ()

    def add(self, note: PlacementNote) -> None:
        """Notes a change; it gets the next number."""
        with self._lock:
            number = self._newest[-1].number + 1 if self._newest else 1
            self._newest = (*self._newest[1 - MOST_KEPT :], replace(note, number=number))

    @property
    def newest(self) -> tuple[PlacementNote, ...]:
        """The newest ones, the oldest first."""
        return self._newest
