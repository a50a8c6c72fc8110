"""What an HTTP request has begun on instances ends with it.

A client that leaves cancels the task that answers it. The generators that this task read from are closed only once
nothing refers to them; frames that caught the cancellation may refer to each other, and then the next garbage
collection closes them, seconds or minutes later. So what runs is noted here, and ended by name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Begun:
    """Ids of what one HTTP request has running on instances."""

    def __init__(self) -> None:
        self._request_ids: set[str] = set()
        self.is_over = False  # the HTTP request has been answered, or its client has left: nothing more begins

    def add(self, request_id: str) -> None:
        """It runs."""
        self._request_ids.add(request_id)

    def discard(self, request_id: str) -> None:
        """It has ended."""
        self._request_ids.discard(request_id)

    def end(self) -> list[str]:
        """Closes the list; ids of what still runs."""
        self.is_over = True
        return sorted(self._request_ids)


current_begun: ContextVar[Begun | None] = ContextVar("current_begun", default=None)


@contextmanager
def ending_with_block(abort: Callable[[list[str]], None]) -> Iterator[Begun]:
    """Notes what begins in the block, and gives `abort` what still runs at its end."""
    begun = Begun()
    try:
        yield begun
    finally:
        if left := begun.end():
            abort(left)
