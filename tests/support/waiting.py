"""Waiting for what nothing announces."""

import time
from collections.abc import Callable


def until(condition: Callable[[], bool], timeout_s: float = 40.0, period_s: float = 0.002) -> None:
    """Returns once the condition holds; fails where it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(period_s)
