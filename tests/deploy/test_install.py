"""What `make setup` prints while pip works."""

import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
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


def test_every_pin_of_the_lock_has_the_hash_of_its_file(install: ModuleType) -> None:
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    hashed = [pin for pin in pins if re.search(r"==\S+ --hash=sha256:[0-9a-f]{64}$", pin)]
    assert {pin.partition("==")[0] for pin in pins if pin not in hashed} == install.UNHASHED
    plain = install.without_hashes(lines)
    assert install.required(plain) == install.required(lines)
    assert not any("--hash" in line for line in plain if not line.startswith("#"))


def test_a_file_that_is_another_one_is_refused(tmp_path: Path) -> None:
    wheel(tmp_path, "small", "1.0")
    lock = tmp_path / "lock.txt"
    right = hashlib.sha256((tmp_path / "small-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    for digest, options, expected in (("0" * 64, [], 1), (right, [], 0), ("0" * 64, ["--without-hashes"], 0)):
        lock.write_text(f"small==1.0 --hash=sha256:{digest}\n")
        done = run_install(lock, tmp_path / "target", tmp_path, *options)
        assert done.returncode == expected, done.stderr
        assert ("DO NOT MATCH THE HASHES" in done.stderr) is (expected == 1)


def test_hashes_are_renewed(tmp_path: Path) -> None:
    wheel(tmp_path, "small", "1.0")
    lock = tmp_path / "lock.txt"
    lock.write_text("# why\nsmall==1.0 --hash=sha256:" + "0" * 64 + "\n")
    assert run_install(lock, tmp_path / "target", tmp_path, "--renew-hashes").returncode == 0
    right = hashlib.sha256((tmp_path / "small-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    assert lock.read_text() == f"# why\nsmall==1.0 --hash=sha256:{right}\n"


def wheel(directory: Path, name: str, version: str) -> None:
    """Write the smallest wheel that pip installs."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(directory / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def run_install(lock: Path, target: Path, wheels: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """deploy/install.py without an index, into a folder of the test's own."""
    environment = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_TARGET": str(target), "PIP_UPGRADE": "1"}
    return subprocess.run(
        [sys.executable, ROOT / "deploy" / "install.py", *options, sys.executable, lock],
        capture_output=True,
        text=True,
        timeout=200,
        env={**environment, "PATH": "/usr/bin:/bin"},
    )


def test_it_says_what_is_fetched_and_how_much_is_left(install: ModuleType, tmp_path: Path) -> None:
    progress = install.PipProgress(3, tmp_path)
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
