"""Laws of a run with a limit of time: tests that would begin too late are skipped and counted, and nothing fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = "from tests.support.run_budget import pytest_configure\n"
TESTS = """
import time

def test_takes_long():
    time.sleep(1.5)

def test_comes_too_late():
    raise AssertionError

def test_comes_too_late_as_well():
    raise AssertionError
"""


def run(folder: Path, seconds: str, *arguments: str) -> tuple[int, str]:
    """The exit status of a run that has so many seconds, and what it prints."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(TESTS)
    options = ("-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider", *arguments)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PENGSERVE_TEST_SECONDS": seconds}
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
    status, printed = run(tmp_path, "1", *arguments)
    assert status == 0 and "1 passed, 2 skipped" in printed, printed
    assert "NOT RUN: 2 tests, because 1 s were over" in printed, printed


def test_without_a_limit_all_run(tmp_path: Path) -> None:
    status, printed = run(tmp_path, "")
    assert status == 1 and "2 failed, 1 passed" in printed and "NOT RUN" not in printed, printed
