"""How fast this machine is, so that a test of a computation's cost says the same on each.

    assert least_cpu_s(lambda: plan(snapshot), times=9) < 0.01 * slowness()

Processor time of this thread is measured, not the time on the wall: other processes do not count.
"""

import time
from collections.abc import Callable
from functools import cache

_REFERENCE_S = 0.004  # what `_loop` takes on the machine that bounds were set on, an AMD EPYC of 2024
_SPREAD = 1.5  # the loop and a planner do not slow down alike: caches differ


def least_cpu_s(action: Callable[[], object], times: int) -> float:
    """The least processor time of `times` calls, in seconds."""
    found = float("inf")
    for _ in range(times):
        start_s = time.thread_time()
        action()
        found = min(found, time.thread_time() - start_s)
    return found


@cache
def slowness() -> float:
    """How many times as long as on the fast machine a computation in Python may take here; at least 1."""
    return max(1.0, _SPREAD * least_cpu_s(_loop, 7) / _REFERENCE_S)


def _loop() -> None:
    values: dict[int, float] = {}
    for i in range(60_000):
        values[i % 512] = values.get(i % 512, 0.0) + i * 0.5
