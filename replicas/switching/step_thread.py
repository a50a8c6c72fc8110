"""The step thread of an instance, as other threads reach it: now, later, or with an answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from pengserve.planners.types.errors import StepError

T = TypeVar("T")
Submit = Callable[[Callable[[], object]], None]


class StepThread:
    """`submit` runs work between two steps and returns at once."""

    def __init__(self, submit: Submit, timeout_s: float) -> None:
        self.submit, self._timeout_s = submit, timeout_s

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
        timer = threading.Timer(delay_s, lambda: self.submit(work))
        timer.daemon = True
        timer.start()
