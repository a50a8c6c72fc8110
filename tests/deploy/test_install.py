"""What `make setup` prints while pip works."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def install() -> ModuleType:
    """deploy/install.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("install", ROOT / "deploy" / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_pin_of_the_lock_is_counted(install: ModuleType) -> None:
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert len(install.required(lines)) == len(pins) > 100


def test_it_says_what_is_fetched_and_how_much_is_left(install: ModuleType, tmp_path: Path) -> None:
    progress = install.Progress(3, tmp_path)
    progress.read("Collecting numpy==2.0 (from -r lock (line 1))\n")
    assert progress.line().startswith("fetching numpy: 2 of 3 left")
    progress.read("Requirement already satisfied: rich==15 in ./site-packages\n")
    assert progress.line().startswith("fetching rich: 1 of 3 left")
    progress.read("Installing collected packages: numpy, rich\n")
    (tmp_path / "numpy-2.0.dist-info").mkdir()
    assert progress.line().startswith("installing: 2 of 3 packages left")


def test_pip_s_own_words_are_shown_where_it_fails(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("no-such-package-of-pengserve==1.0\n")
    done = subprocess.run(
        [sys.executable, ROOT / "deploy" / "install.py", sys.executable, lock],
        capture_output=True,
        text=True,
        timeout=200,
        env={"PIP_NO_INDEX": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 1
    assert "no-such-package-of-pengserve" in done.stderr
    assert "Run `make setup` again" in done.stderr
