"""A file of lines that a process appends to: whole lines, of bounded size, on a disk that may be full.

    events.jsonl      the newest lines; it is renamed when the next lines would make it too long
    events.jsonl.1    those before
    events.jsonl.2    ...

A line that a crash or a full disk tore stands alone: the next one begins after a line break. Several processes may
append to one file. The file is opened for each call, so that it may be moved or deleted from outside.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pengserve.planners.types.units import MIB

_LOCK_TRIES, _LOCK_PAUSE_S = 20, 0.001

Write = Callable[[int, memoryview], int]  # as `os.write`: returns how many bytes it took


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """How much of a log is kept."""

    max_bytes: int = 64 * MIB  # of each file; 0: no limit
    num_older: int = 4  # files that are kept besides the newest


DEFAULT_LIMITS = FileLimits()


class LineFile:
    """Appends lines to `path`, in the caller's thread. Blocks for as long as the disk does."""

    def __init__(self, path: Path, limits: FileLimits = DEFAULT_LIMITS, write: Write = os.write) -> None:
        """`write` stands for `os.write`, for tests of disks that fail."""
        self.path = path
        self._limits, self._write = limits, write

    def append(self, lines: bytes) -> None:
        """Appends `lines`, which end with a line break. What a failure has written of them is taken back.

        Raises:
            OSError: the disk is full, the path cannot be written, and so on. A later call may succeed.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self._open()
        try:
            is_alone = _lock(file)
            if is_alone and self._is_full(file, len(lines)) and self._is_current(file):
                self._rotate()
                os.close(file)
                file = self._open()
                is_alone = _lock(file)
            self._append(file, lines, is_alone)
        finally:
            os.close(file)

    def tail(self, max_bytes: int) -> list[bytes]:
        """The last whole lines of all files, oldest first, `max_bytes` at most.

        Raises:
            OSError: a file is there and cannot be read.
        """
        blocks: list[bytes] = []
        is_cut = False
        for path in (self.path, *map(self._older, range(1, self._limits.num_older + 1))):
            if max_bytes <= 0 or not path.is_file():
                break
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - max_bytes))
                blocks.append(file.read())
            is_cut = size > max_bytes
            max_bytes -= size
        lines = [line for block in reversed(blocks) for line in block.splitlines()]
        return lines[1:] if is_cut else lines  # the first is most likely the end of a line

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def _append(self, file: int, lines: bytes, is_alone: bool) -> None:
        about = os.fstat(file)
        is_regular = stat.S_ISREG(about.st_mode)
        if is_regular and about.st_size and os.pread(file, 1, about.st_size - 1) != b"\n":
            lines = b"\n" + lines
        left = memoryview(lines)
        try:
            while left:  # a short write is no error: the rest may still fit
                taken = self._write(file, left)
                if taken == 0:
                    raise OSError(errno.ENOSPC, "the disk takes nothing")
                left = left[taken:]
        except OSError:
            if is_regular and is_alone:
                with suppress(OSError):
                    os.ftruncate(file, about.st_size)
            raise

    def _is_full(self, file: int, num_bytes: int) -> bool:
        size = os.fstat(file).st_size
        return bool(self._limits.max_bytes and size and size + num_bytes > self._limits.max_bytes)

    def _is_current(self, file: int) -> bool:
        """Whether `file` is still the one at the path: another process may have rotated it."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(file), self.path.stat())
        return False

    def _rotate(self) -> None:
        paths = [self.path, *map(self._older, range(1, self._limits.num_older + 1))]
        for newer, older in reversed(list(pairwise(paths))):
            with suppress(FileNotFoundError):
                newer.replace(older)
        if not self._limits.num_older:
            self.path.unlink()

    def _older(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def _lock(file: int) -> bool:
    """Whether no other process appends now. Waits for 20 ms at most: a stopped process must not stop this one."""
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_LOCK_PAUSE_S)
        except OSError:
            return False  # this file system has no locks
        else:
            return True
    return False
