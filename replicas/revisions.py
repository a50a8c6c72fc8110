"""Revision numbers of an instance's status: two answers with one number differ in loads and term alone."""

import threading
from dataclasses import replace
from typing import Any

from pengserve.planners.types.snapshot import InstanceSnapshot, face_of


class Revisions:
    """Numbers the answers of one incarnation. Many threads may answer at once.

    The instance compares its answers, so that a controller of a thousand instances compares only two numbers for each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._face: tuple[Any, ...] = ()
        self._newest = 0

    def numbered(self, answer: InstanceSnapshot) -> InstanceSnapshot:
        """`answer` with its revision: a new one where it differs from the one before in more than its loads."""
        face = face_of(answer)
        with self._lock:
            if face != self._face:
                self._face, self._newest = face, self._newest + 1
            return replace(answer, revision=self._newest)
