"""What a local cluster leaves on the machine while it runs, and how it is found again after a SIGKILL.

`Scratch` is a private directory with a short path, a second one for temporary files, and a mark: a random value in the
environment of every process of the cluster. A record in the directory names the owner. Where the owner is gone, what
carries its mark is its own, and nothing else is touched.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "PS_CLUSTER_MARK"
# Unix sockets have paths of at most 107 bytes and Serve puts a node id of 56 into them: this is not TMPDIR.
PARENT = Path("/tmp")
PREFIX = "ps-"
RECORD = "owner.json"
POLL_PERIOD_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Directories of one local cluster, and the mark of its processes."""

    directory: str
    temporary: str  # TMPDIR of its processes
    mark: str

    @classmethod
    def create(cls) -> "Scratch":
        """New directories, which this process owns."""
        scratch = cls(
            directory=tempfile.mkdtemp(prefix=PREFIX, dir=PARENT),
            temporary=tempfile.mkdtemp(prefix="pengserve-"),
            mark=secrets.token_hex(16),
        )
        record = {
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "mark": scratch.mark,
            "temporary": scratch.temporary,
        }
        path = Path(scratch.directory, RECORD)
        path.with_suffix(".new").write_text(json.dumps(record), encoding="utf-8")
        path.with_suffix(".new").replace(path)
        return scratch

    def remove(self) -> None:
        """Delete both directories."""
        for directory in (self.temporary, self.directory):  # the record last
            shutil.rmtree(directory, ignore_errors=True)

    def processes(self) -> list[int]:
        """Living processes of the cluster, but for this one."""
        wanted = f"{MARK}={self.mark}".encode()
        return [pid for pid in _own_processes() if pid != os.getpid() and wanted in _environment(pid)]

    def end_processes(self, patience_s: float) -> int:
        """Wait `patience_s` for the cluster's processes to end by themselves, then kill them; how many were killed."""
        deadline_s = time.monotonic() + patience_s
        while (left := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(POLL_PERIOD_S)
        num_killed = len(left)
        while left:  # one that begins another while it is killed leaves that one to the next round
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_PERIOD_S)
            left = self.processes()
        return num_killed


def remove_leftovers() -> int:
    """Remove what local clusters left whose owners were killed; the number of them."""
    num_removed = 0
    for scratch in _abandoned():
        scratch.end_processes(0.0)
        scratch.remove()
        num_removed += 1
    return num_removed


def _abandoned() -> Iterator[Scratch]:
    """Directories of this user whose recorded owner does not live any more."""
    for path in PARENT.glob(f"{PREFIX}*/{RECORD}"):
        try:
            if path.parent.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            pid, started = int(record["pid"]), str(record["started"])
            temporary, mark = Path(record["temporary"]), str(record["mark"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not ours, or gone meanwhile
        is_plain = temporary.name.startswith("pengserve-") and not temporary.is_symlink() and len(mark) == 32
        if is_plain and started != _started(pid):
            yield Scratch(directory=str(path.parent), temporary=str(temporary), mark=mark)


def _started(pid: int) -> str:
    """When a process began, as boot and clock ticks: with the process id it names one process for good."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return "" if fields[0] in ("Z", "X") else f"{boot} {fields[19]}"


def _own_processes() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == os.getuid() and _started(int(entry.name)):
                yield int(entry.name)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it has ended
