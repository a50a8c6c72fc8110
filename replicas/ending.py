"""How the process of an instance ends that is an orphan or was told to end: gently if that works, else for certain."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar

import psutil

from pengserve.replicas.lease import Lease
from pengserve.replicas.signal_flag import SignalFlag

logger = logging.getLogger(__name__)

EXIT_MARGIN_S = 30.0  # beyond the time-out of the drain, until the process ends although a part hangs
LINGER_S = 3.0  # with nothing to do, so that the controller sees the end of a drain and not of a process
LOOKS_PER_LEASE = 5

T = TypeVar("T")


class Ending(Protocol):
    """What the end needs of an instance."""

    def retire(self, timeout_s: float) -> bool:
        """Waits until its ingresses have left and nothing runs."""

    def leave(self, timeout_s: float) -> bool:
        """Sends its requests elsewhere, or waits for their ends."""

    def stop(self) -> None:
        """Ends engine and channels."""


class GentleEnd:
    """The end of an instance's process: it finishes what it has, gives back what it holds, and exits.

    A step, a lock or a call to the cluster that hangs does not keep the process: a second thread ends it.
    """

    def __init__(
        self,
        instance: Ending,
        *,
        drain_timeout_s: float,
        release: Callable[[], object],
        exit_process: Callable[[int], object] | None = None,
        exit_margin_s: float = EXIT_MARGIN_S,
        linger_s: float = LINGER_S,
    ) -> None:
        """
        Args:
            release: frees what the cluster keeps for the instance.
        """
        self._instance, self._release = instance, release
        self._drain_timeout_s, self._exit_margin_s, self._linger_s = drain_timeout_s, exit_margin_s, linger_s
        self._exit = exit_process or exit_with_children
        self._has_begun = threading.Lock()

    def retire(self) -> None:
        """Ends an orphan, whose ingresses have left or will. Returns only in tests."""
        self._end([partial(self._instance.retire, self._drain_timeout_s)])

    def leave(self) -> None:
        """Ends an instance that was told to end while its application goes on. Returns only in tests."""
        self._end([partial(self._instance.leave, self._drain_timeout_s), partial(time.sleep, self._linger_s)])

    def on_sigterm(self) -> None:
        """From now on SIGTERM makes the instance leave. For the main thread alone."""
        told = SignalFlag()

        def leave() -> None:
            told.wait()
            logger.warning("SIGTERM: this instance leaves")
            self.leave()

        # A handler may neither log nor start a thread: the code that it interrupts may hold the lock for it.
        threading.Thread(target=leave, name="leave", daemon=True).start()
        signal.signal(signal.SIGTERM, lambda *_: told.set())

    def _end(self, finish: Iterable[Callable[[], object]]) -> None:
        if not self._has_begun.acquire(blocking=False):
            return
        for step in (self._arm, *finish, self._instance.stop, self._release):
            try:
                step()
            except Exception:
                logger.exception("a part of this instance's end failed; going on")
        self._exit(0)

    def _arm(self) -> None:
        last_resort = threading.Timer(self._drain_timeout_s + self._exit_margin_s, self._exit, (1,))
        last_resort.daemon = True
        last_resort.start()


class LeaseWatch:
    """A thread that waits for the end of the lease, and then ends the process of the instance."""

    def __init__(self, lease: Lease, end: GentleEnd) -> None:
        self._lease, self._end = lease, end
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def _run(self) -> None:
        while not self._has_ended():
            time.sleep(self._lease.lease_s / LOOKS_PER_LEASE)
        logger.warning("no controller has called and the application is gone: this instance ends")
        self._end.retire()

    def _has_ended(self) -> bool:
        try:
            return self._lease.ended()
        except Exception:
            logger.exception("the lease could not be checked; trying again")
            return False


def exit_with_children(status: int) -> None:
    """Ends this process at once, after its descendants: an engine's workers may hang as well."""
    try:
        for child in psutil.Process().children(recursive=True):
            try:
                child.kill()
            except psutil.Error:
                continue
    finally:
        os._exit(status)


def answer_within(timeout_s: float, ask: Callable[[], T]) -> T | None:
    """What `ask` returns, from a thread of its own; None where it takes longer or raises."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            logger.warning("the cluster could not be asked: %s: %s", type(error).__name__, error)

    thread = threading.Thread(target=run, name="ask", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else None
