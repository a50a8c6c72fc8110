"""Virtual time for asyncio: a loop that never waits, but jumps to the next thing that is due.

Coroutines that sleep, time out and wait for each other run unchanged, and in the same order every time: the production
controller is one of them. Nothing in such a run may read the real clock, a socket or another thread.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from pengserve.planners.types.errors import PengServeError

T = TypeVar("T")


class DeadlockError(PengServeError):
    """Everything in a simulation waits for something else: it would never end. A fault of the simulation."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` is virtual seconds since its start. Events due at one time run in their order."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jump(self))

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Moves the clock; called where a real loop would wait."""
        self._now_s += seconds


class _Jump(selectors.SelectSelector):
    """Where the loop would wait for sockets, no time passes but virtual time."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("nothing is due, and the simulation has not ended: report this as a bug")
        if timeout > 0:
            self._loop.jump(timeout)
        return []


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end in virtual time, as `asyncio.run` does in real time.

    Raises:
        DeadlockError: `main` waits for what can never come.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
