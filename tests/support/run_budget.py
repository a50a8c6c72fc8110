"""Keeps a run of tests within its time: what would begin too late is skipped, and the run says so.

CI has 90 minutes on machines of which some are eight times slower than others. A quick one runs everything; a slow one
runs as much as it can, in the usual order, instead of being cut off without a result.
"""

import os
import time
from collections.abc import Callable

import pytest

VARIABLE = "TESTS_UNTIL"  # seconds since the Unix epoch. `pengserve` refuses names that begin with its own.
REASON = f"no test begins later than {VARIABLE} says"


class RunBudget:
    """A pytest plugin."""

    def __init__(self, until_s: float, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._until_s = clock, until_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Before fixtures of the test are made: an engine alone takes ten seconds."""
        if self._clock() >= self._until_s:
            pytest.skip(REASON)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """One line that cannot be overlooked among many skipped tests."""
        late = sum(REASON in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
        if late:
            terminalreporter.write_line(f"NOT RUN, because the time was over: {late} tests", red=True)


def pytest_configure(config: pytest.Config) -> None:
    """Adds the budget to a run that has one."""
    if until_s := os.environ.get(VARIABLE):
        config.pluginmanager.register(RunBudget(float(until_s)), "run budget")
