"""Steps that a scheduler has handed out and that have not been finished, by their handles (`SimStep.handle`)."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from pengserve.planners.types.errors import PlanError

H = TypeVar("H")


class UnfinishedSteps(Generic[H]):
    """The oldest first."""

    def __init__(self, most: int = 1) -> None:
        """So many at once."""
        self._most = most
        self._handles: deque[H] = deque()

    def __iter__(self) -> Iterator[H]:
        return iter(self._handles)

    def require_room(self) -> None:
        """Raises PlanError where no other step may begin."""
        if len(self._handles) >= self._most:
            raise PlanError(f"{len(self._handles)} steps are unfinished: finish one first")

    def begin(self, handle: H) -> None:
        """A step was scheduled."""
        self._handles.append(handle)

    def finish(self, handle: H) -> H:
        """The oldest step has ended; its handle.

        Raises:
            PlanError: it is another one.
        """
        if not self._handles or self._handles[0] is not handle:
            raise PlanError("steps must be finished in the order in which they were scheduled, each once")
        return self._handles.popleft()
