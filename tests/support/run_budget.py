"""Keeps a run of tests within the time that it is given: what would begin too late is skipped, and the run says so.

CI has 90 minutes on machines of which some are eight times slower than others. A quick one runs everything; a slow one
runs as much as it can, in the usual order, instead of being cut off without a result.
"""

import os
import time
from collections.abc import Callable

import pytest

VARIABLE = "PENGSERVE_TEST_SECONDS"
REASON = f"the seconds of this run ({VARIABLE}) are over"


class RunBudget:
    """A pytest plugin."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds, self._end_s = clock, seconds, clock() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Before fixtures of the test are made: an engine alone takes ten seconds."""
        if self._clock() >= self._end_s:
            pytest.skip(REASON)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line that cannot be overlooked among many skipped tests."""
        late = sum(REASON in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
        if late:
            terminalreporter.write_line(f"NOT RUN: {late} tests, because {self._seconds:.0f} s were over", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Adds the budget to a run that has one."""
    if seconds := os.environ.get(VARIABLE):
        config.pluginmanager.register(RunBudget(float(seconds)), "run budget")
