"""Keeps a run of the GPU's tests (`-m gpu`) within ten minutes, also where some of them hang.

order    tests with a short time-out come first, so that what hangs costs no other test its turn
time     a test has its own time-out, or what is left of the run where that is less
the end  a test that would begin too late is skipped, and says so
"""

import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.gpu.device import IS_CUDA

VARIABLE = "PENGSERVE_GPU_TEST_SECONDS"
RUN_S = 560.0  # what ends after it has the rest of the ten minutes
LEAST_S = 5.0  # no test begins with less


class GpuBudget:
    """A pytest plugin."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end_s = clock, clock() + seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Raises UsageError where a test for a GPU has no time-out of its own."""
        of_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
        for item in of_gpu:
            if item.get_closest_marker("timeout") is None:
                raise pytest.UsageError(f"{item.nodeid} is for a GPU and has no pytest.mark.timeout of its own")
        if len(of_gpu) == len(items):
            items.sort(key=_timeout_s)

    @pytest.hookimpl(tryfirst=True, hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Before pytest-timeout looks how long the test may take."""
        if item.get_closest_marker("gpu") is not None:
            left_s = self._end_s - self._clock()
            if left_s < LEAST_S:
                item.add_marker(pytest.mark.skip(reason="the ten minutes of this run are over; run it by its name"))
            else:
                item.add_marker(pytest.mark.timeout(min(_timeout_s(item), left_s)), append=False)
        yield


def _timeout_s(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    assert marker is not None
    return float(marker.args[0])


def pytest_configure(config: pytest.Config) -> None:
    """Adds the budget to a run. Where these tests run on a CPU, so that they themselves are checked, there is none."""
    usual_s = RUN_S if IS_CUDA else float("inf")
    config.pluginmanager.register(GpuBudget(float(os.environ.get(VARIABLE, usual_s))), "gpu budget")
