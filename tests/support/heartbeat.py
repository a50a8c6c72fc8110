"""Prints a line when a test run has printed nothing for a while, and names the test that is running."""

import os
import threading
import time

import pytest

QUIET_S = 45.0


class Heartbeat:
    """A pytest plugin of the process that prints: the only one, or the one that hands tests out to others."""

    def __init__(self, quiet_s: float = QUIET_S) -> None:
        self._quiet_s = quiet_s
        self._terminal = os.dup(1)  # while a test runs, pytest has its own file in this place
        self._running: dict[str, float] = {}  # test -> since when, on the monotonic clock
        self._printed_s = time.monotonic()
        self._lock, self._over = threading.Lock(), threading.Event()
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins, here or in a worker."""
        with self._lock:
            self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test has ended, and its letter is printed."""
        with self._lock:
            self._running.pop(nodeid, None)
            self._printed_s = time.monotonic()

    def pytest_sessionfinish(self) -> None:
        """No more lines."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(self._quiet_s / 10):
            now_s = time.monotonic()
            with self._lock:
                if now_s - self._printed_s < self._quiet_s:
                    continue
                self._printed_s = now_s
                what = ", ".join(f"{nodeid} for {now_s - since_s:.0f} s" for nodeid, since_s in self._running.items())
            os.write(self._terminal, f"\n... still running {what or 'fixtures'}\n".encode())


def is_worker(config: pytest.Config) -> bool:
    """Whether this process runs tests for another one that prints."""
    return hasattr(config, "workerinput")
