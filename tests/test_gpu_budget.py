"""Laws of a run on a GPU, seen without one: it ends in time, also where a test hangs; short tests come first."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFTEST = "from tests.support.gpu_budget import pytest_configure\n"
HEAD = "import time, pytest\npytestmark = pytest.mark.gpu\n"


def run(folder: Path, tests: str, seconds: float) -> str:
    """What a run prints that has so many seconds."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_some.py").write_text(HEAD + tests)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
        "-v",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PENGSERVE_GPU_TEST_SECONDS": str(seconds)}
    done = subprocess.run(
        [*command, str(folder)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.stdout + done.stderr


def test_what_hangs_is_ended_with_the_run_and_what_is_left_is_skipped(tmp_path: Path) -> None:
    tests = """
@pytest.mark.timeout(1000)
def test_hangs():
    time.sleep(1000)

@pytest.mark.timeout(2000)
def test_comes_too_late():
    pass

@pytest.mark.timeout(500)
def test_is_short():
    pass
"""
    printed = run(tmp_path, tests, 15.0)
    found = re.findall(r"::(\w+) (\w+)", printed.split("FAILURES")[0])
    assert found == [("test_is_short", "PASSED"), ("test_hangs", "FAILED"), ("test_comes_too_late", "SKIPPED")], printed


def test_each_test_needs_a_time_out_of_its_own(tmp_path: Path) -> None:
    printed = run(tmp_path, "def test_has_none():\n    pass\n", 100.0)
    assert "test_has_none is for a GPU and has no pytest.mark.timeout" in printed
