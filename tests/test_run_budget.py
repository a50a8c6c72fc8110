"""Laws of a run with an end: tests that would begin too late are skipped and counted, and nothing fails by it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A clock that the tests themselves move.
CONFTEST = """
import os
from tests.support.run_budget import RunBudget

def pytest_configure(config):
    budget = RunBudget(1.0, lambda: float(os.environ.get("NOW_S", "0")))
    config.pluginmanager.register(budget, "run budget")
"""
OF_THE_ENVIRONMENT = "from tests.support.run_budget import pytest_configure\n"
TESTS = """
import os

def test_takes_until_the_end():
    os.environ["NOW_S"] = "1"

def test_comes_too_late():
    raise AssertionError

def test_comes_too_late_as_well():
    raise AssertionError
"""


def run(folder: Path, conftest: str, *arguments: str, until_s: str = "") -> tuple[int, str]:
    """The exit status of a run of `TESTS`, and what it prints."""
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_some.py").write_text(TESTS)
    options = ("-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider", *arguments)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TESTS_UNTIL": until_s}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [(), ("-n", "1")], ids=["one process", "a worker"])
def test_what_would_begin_too_late_is_skipped_and_told(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    status, printed = run(tmp_path, CONFTEST, *arguments)
    assert status == 0 and "1 passed, 2 skipped" in printed, printed
    assert "NOT RUN, because the time was over: 2 tests" in printed, printed


def test_the_environment_says_when_the_end_is(tmp_path: Path) -> None:
    status, printed = run(tmp_path, OF_THE_ENVIRONMENT, until_s="1")
    assert status == 0 and "3 skipped" in printed, printed


def test_without_an_end_all_run(tmp_path: Path) -> None:
    status, printed = run(tmp_path, OF_THE_ENVIRONMENT)
    assert status == 1 and "2 failed, 1 passed" in printed and "NOT RUN" not in printed, printed
