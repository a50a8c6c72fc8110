"""The step thread of an instance, as other threads reach it: now, later, or with an answer."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from heapq import heappop, heappush
from itertools import count
from typing import TypeVar

from pengserve.planners.types.errors import StepError

T = TypeVar("T")
Submit = Callable[[Callable[[], object]], None]

IDLE_S = 10.0  # the thread that waits ends when nothing has been waited for so long


class StepThread:
    """`submit` runs work between two steps and returns at once."""

    def __init__(self, submit: Submit, timeout_s: float) -> None:
        self.submit, self._timeout_s = submit, timeout_s
        self._waits = _Waits(submit)

    def ask(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises.

        Raises:
            StepError: it was not begun or not done in time; it may be done later.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self.submit(run)
        try:
            return done.result(self._timeout_s)
        except FutureTimeoutError:
            raise StepError(f"the step thread reached no step boundary within {self._timeout_s:g} s") from None

    def after(self, delay_s: float, work: Callable[[], object]) -> None:
        """Submits `work` once `delay_s` have passed."""
        self._waits.add(time.monotonic() + delay_s, work)


class _Waits:
    """Submits each work when it is due, from one thread for all: a switch waits up to four times, mostly in vain."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._due: list[tuple[float, int, Callable[[], object]]] = []  # a heap
        self._numbers = count()  # of works, as those that are due at once cannot be compared
        self._changed = threading.Condition()
        self._has_thread = False

    def add(self, due_s: float, work: Callable[[], object]) -> None:
        with self._changed:
            heappush(self._due, (due_s, next(self._numbers), work))
            if self._has_thread:
                self._changed.notify()
                return
            self._has_thread = True
        threading.Thread(target=self._run, name="waits of the step thread", daemon=True).start()

    def _run(self) -> None:
        while (work := self._next()) is not None:
            self._submit(work)

    def _next(self) -> Callable[[], object] | None:
        """Waits for what is due next; None where nothing has been for `IDLE_S`, and the thread must end."""
        with self._changed:
            while True:
                if not self._due:
                    self._changed.wait(IDLE_S)
                    if not self._due:
                        self._has_thread = False
                        return None
                left_s = self._due[0][0] - time.monotonic()
                if left_s <= 0:
                    return heappop(self._due)[2]
                self._changed.wait(left_s)
