"""Installs the locked packages into a virtual environment, and shows how far it is: what `make setup` runs.

    python deploy/install.py .venv/bin/python requirements-cpu.txt
    python deploy/install.py --renew-hashes .venv/bin/python requirements-cpu.txt

A pin has the hash of its wheel for Python 3.11 on Linux x86-64: another file of the same version is refused. Those of
`UNHASHED` have none. On other Pythons, and with `--without-hashes`, the versions alone count.

Standard library only: it runs before anything is installed. On a terminal one line is redrawn; elsewhere a line is
printed every few seconds, so that a log never stands still.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

HASHED_PYTHON = (3, 11)
UNHASHED = frozenset({"torch"})  # indexes have builds of their own under one version
PERIOD_S = 4.0  # between lines where the output is no terminal
REDRAW_S = 0.5
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)==")
_HASHES = re.compile(r"( --hash=\S+)+$")
_FETCHING = re.compile(r"^Collecting ([^=\s]+)")
_SATISFIED = re.compile(r"^Requirement already satisfied: ([^=\s]+)")
_INSTALLING = "Installing collected packages"


def required(lines: Iterable[str]) -> list[str]:
    """Names in a file of pinned requirements, as the file writes them."""
    return [match[1] for line in lines if (match := _REQUIREMENT.match(line))]


class PipProgress:
    """How many packages pip has fetched and installed, read from what it prints and from what it has unpacked."""

    def __init__(self, num_packages: int, site_packages: Path) -> None:
        self._num_packages, self._site_packages = num_packages, site_packages
        self._started_s = time.monotonic()
        self._seen: set[str] = set()
        self._current = ""
        self._is_installing = False

    def read(self, line: str) -> None:
        """Takes in one line of pip's output."""
        if match := _FETCHING.match(line) or _SATISFIED.match(line):
            self._current = match[1]
            self._seen.add(match[1])
        if line.startswith(_INSTALLING):
            self._is_installing = True

    def line(self) -> str:
        """One sentence for a person."""
        elapsed = f"{time.monotonic() - self._started_s:.0f} s"
        if self._is_installing:
            left = max(0, self._num_packages - self._num_unpacked())
            return f"installing: {left} of {self._num_packages} packages left ({elapsed})"
        left = max(0, self._num_packages - len(self._seen))
        return f"fetching {self._current or 'packages'}: {left} of {self._num_packages} left ({elapsed})"

    def done(self) -> str:
        """What was done, at the end."""
        return f"{self._num_packages} packages are installed ({time.monotonic() - self._started_s:.0f} s)"

    def _num_unpacked(self) -> int:
        return sum(1 for _ in self._site_packages.glob("*.dist-info"))


def without_hashes(lines: Iterable[str]) -> list[str]:
    """The same pins, for another Python than the hashes are for."""
    return [_HASHES.sub("", line) for line in lines]


def install(python: str, requirements: Path, *, with_hashes: bool = True) -> int:
    """Runs pip; its exit code. Its output is shown where it fails."""
    lines = requirements.read_text().splitlines()
    if not with_hashes or _ask(python, "import sys; print(sys.version_info[:2])") != str(HASHED_PYTHON):
        return _install(python, without_hashes(lines))
    hashed = [line for line in lines if _HASHES.search(line)]
    return _install(python, hashed, "--require-hashes") or _install(python, without_hashes(lines))


def renew_hashes(python: str, requirements: Path) -> None:
    """Writes the hash of the file that pip would install now behind each pin."""
    with tempfile.TemporaryDirectory() as directory:
        plain, report = Path(directory, requirements.name), Path(directory, "report.json")
        lines = without_hashes(requirements.read_text().splitlines())
        plain.write_text("\n".join(lines) + "\n")
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(report), "-r", str(plain)]
        subprocess.run([*_pip(python), *options], check=True)
        hashes = {
            _normal(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]["sha256"]
            for item in json.loads(report.read_text())["install"]
        }
    for index, line in enumerate(lines):
        if (match := _REQUIREMENT.match(line)) and match[1] not in UNHASHED:
            lines[index] = f"{line} --hash=sha256:{hashes[_normal(match[1])]}"
    requirements.write_text("\n".join(lines) + "\n")


def _install(python: str, lines: Sequence[str], *options: str) -> int:
    """Installs what is missing of `lines`."""
    site_packages = Path(_ask(python, "import sysconfig; print(sysconfig.get_paths()['purelib'])"))
    with tempfile.TemporaryDirectory() as directory:
        pins = Path(directory, "requirements.txt")
        pins.write_text("\n".join(lines) + "\n")
        return _run_pip([*_pip(python), *options, "-r", str(pins)], PipProgress(len(required(lines)), site_packages))


def _run_pip(command: Sequence[str], progress: PipProgress) -> int:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        output: list[str] = []
        over = threading.Event()
        shower = threading.Thread(target=_show, args=(progress, over), daemon=True)
        shower.start()
        for line in pip.stdout:
            output.append(line)
            progress.read(line)
        status = pip.wait()
        over.set()
        shower.join()
    if status != 0:
        sys.stderr.write("".join(output[-40:]))
        sys.stderr.write(f"\npip ended with {status}; its last lines are above. Run `make setup` again to go on.\n")
    else:
        print(progress.done(), flush=True)
    return status


def _show(progress: PipProgress, over: threading.Event) -> None:
    is_terminal = sys.stdout.isatty()
    while not over.wait(REDRAW_S if is_terminal else PERIOD_S):
        if is_terminal:
            print(f"\r\x1b[K{progress.line()}", end="", flush=True)
        else:
            print(progress.line(), flush=True)
    if is_terminal:
        print("\r\x1b[K", end="", flush=True)


def _pip(python: str) -> list[str]:
    return [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-color"]


def _ask(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _normal(name: str) -> str:
    """A package's name as indexes have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> int:
    """Installs; 0 when all is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="interpreter of the virtual environment")
    parser.add_argument("requirements", type=Path, help="file of pinned requirements")
    parser.add_argument("--without-hashes", action="store_true", help="take any file of the pinned version")
    parser.add_argument("--renew-hashes", action="store_true", help="install nothing; write the hashes into the file")
    options = parser.parse_args()
    if options.renew_hashes:
        renew_hashes(options.python, options.requirements)
        return 0
    return install(options.python, options.requirements, with_hashes=not options.without_hashes)


if __name__ == "__main__":
    sys.exit(main())
