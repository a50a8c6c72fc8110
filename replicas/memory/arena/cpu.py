"""Physical memory of a CPU instance: one anonymous file in memory, mapped in pieces.

    reserve   mmap(PROT_NONE, private, no reserve)      an access kills the process by SIGSEGV: no silent zeros
    map       mmap(MAP_FIXED, shared) of the file       one call per run of neighbouring chunks
    unmap     mmap(MAP_FIXED, PROT_NONE) over it        one call; the addresses stay reserved for the arena

The file's pages are made when the arena is opened, and as huge pages. That decides what a remap costs: to unmap memory
that was used is to take down its page table entries, one for each page (docs/decisions/0008-arena.md).
"""

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from pengserve.planners.types.errors import ConfigError, EngineError, StepError
from pengserve.planners.types.units import MIB, format_bytes
from pengserve.replicas.memory.arena.free_chunks import runs

# What Python's `mmap` has no name for; Linux on x86-64 and arm64 agree.
_PROT_NONE = 0
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_COLLAPSE = 25  # since Linux 6.1; works under every system setting for huge pages of shared memory but "deny"
_HUGE_PAGE_BYTES = 2 * MIB
_NUM_TRIES = 3

_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MAP_FAILED = ctypes.c_void_p(-1).value


class CpuBackend:
    """Chunks of one memfd."""

    granularity = mmap.PAGESIZE

    def __init__(self, *, huge_pages: bool = True, populate: bool | None = None) -> None:
        """Benchmarks set `huge_pages` and `populate` to measure what they save.

        `populate`: whether `map` fills the page table; else the first access to each page does. None: `map` does so
        where chunks consist of huge pages, since filling their few entries costs little.
        """
        self.page_bytes = self.granularity  # of the memory, once there is some
        self.populates = False  # likewise
        self._huge_pages, self._populate = huge_pages, populate
        self._fd: int | None = None
        self._chunk_bytes = 0

    def create(self, num_chunks: int, chunk_bytes: int) -> None:
        """Takes the memory as one memfd, in huge pages where it can; what is added later has small ones.

        Raises ConfigError where the system has less.
        """
        num_bytes = num_chunks * chunk_bytes
        available = available_bytes()
        if num_bytes > available:  # or the system would kill processes until it has it
            raise ConfigError(f"the arena wants {format_bytes(num_bytes)}, {format_bytes(available)} are available")
        if self._fd is not None:
            self._add(self._fd, num_bytes)
            return
        self._chunk_bytes = chunk_bytes
        self._fd = os.memfd_create("pengserve-arena")
        try:
            os.ftruncate(self._fd, num_bytes)
            if self._huge_pages and num_bytes >= _HUGE_PAGE_BYTES and self._make_huge_pages(num_bytes):
                self.page_bytes = _HUGE_PAGE_BYTES
            os.posix_fallocate(self._fd, 0, num_bytes)  # small pages where there are none yet
            is_whole = self.page_bytes > self.granularity and chunk_bytes % self.page_bytes == 0
            self.populates = is_whole if self._populate is None else self._populate
        except OSError as error:
            self.release()
            raise ConfigError(f"the arena cannot have {format_bytes(num_bytes)}: {error.strerror}") from error

    def _add(self, fd: int, num_bytes: int) -> None:
        before = os.fstat(fd).st_size
        try:
            os.posix_fallocate(fd, before, num_bytes)
        except OSError as error:
            os.ftruncate(fd, before)
            wanted = format_bytes(num_bytes)
            raise ConfigError(f"the arena cannot have {wanted} more: {error.strerror}") from error
        self.page_bytes, self.populates = self.granularity, False

    def reserve(self, num_bytes: int) -> int:
        """The address of a new empty range, aligned so that a huge page can be one entry of the page table."""
        unit = _HUGE_PAGE_BYTES if self._huge_pages else self.granularity
        wide = num_bytes + unit - self.granularity
        start = _mmap(None, wide, _PROT_NONE, _RESERVED)
        address = -(-start // unit) * unit
        if address > start:
            _libc.munmap(start, address - start)
        if start + wide > address + num_bytes:
            _libc.munmap(address + num_bytes, start + wide - address - num_bytes)
        return address

    def map(self, address: int, chunks: Sequence[int]) -> int:
        """Maps `chunks`, in order, from `address` on; the number of calls.

        Raises:
            StepError: the system refused; nothing changed.
            EngineError: the system refused, and then refused to unmap what was mapped.
        """
        assert self._fd is not None
        size, num_calls = self._chunk_bytes, 0
        flags = mmap.MAP_SHARED | _MAP_FIXED | (mmap.MAP_POPULATE if self.populates else 0)
        try:
            for index, chunk, count in runs(chunks):
                _mmap(address + index * size, count * size, _READ_WRITE, flags, self._fd, chunk * size)
                num_calls += 1
        except StepError as error:
            try:
                self.unmap(address, len(chunks))
            except StepError as second:
                raise EngineError(
                    f"mapping {len(chunks)} chunks failed ({error}) and the rollback failed too ({second});"
                    " restart this instance"
                ) from error
            raise
        return num_calls

    def wait(self) -> None:
        """Nothing: what a CPU was given it has done when the call returns."""

    def unmap(self, address: int, num_chunks: int) -> int:
        """Takes away what is behind the range, which stays reserved; one call. Raises StepError as `map` does."""
        _mmap(address, num_chunks * self._chunk_bytes, _PROT_NONE, _RESERVED | _MAP_FIXED)
        return 1

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        """The range as bytes, `[num_bytes]`, without touching them. The tensor keeps `owner` alive."""
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        vars(buffer)["owner"] = owner  # the tensor's storage holds the buffer
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def release(self) -> None:
        """Closes the memfd. The system frees the memory once nothing is mapped. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def free(self, address: int, num_bytes: int) -> None:
        """Gives an address range of `reserve` back; nothing is mapped in it."""
        _libc.munmap(address, num_bytes)

    def _make_huge_pages(self, num_bytes: int) -> bool:
        """Whether all of the file now has huge pages. Where the system has none, small ones serve."""
        assert self._fd is not None
        for place in range(0, num_bytes, _HUGE_PAGE_BYTES):  # what is empty is not collapsed
            os.pwrite(self._fd, b"\0", place)
        with contextlib.suppress(StepError):
            address = self.reserve(num_bytes)
            try:
                _mmap(address, num_bytes, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, self._fd)
                for _ in range(_NUM_TRIES):
                    if _libc.madvise(address, num_bytes, _MADV_COLLAPSE) == 0:
                        return True
                    if ctypes.get_errno() != errno.EAGAIN:
                        return False
            finally:
                self.free(address, num_bytes)
        return False


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    got = _libc.mmap(address, num_bytes, protection, flags, fd, offset)
    if got is None or got == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise StepError(f"mmap of {format_bytes(num_bytes)} failed: {reason} (see ulimit -v and vm.max_map_count)")
    return int(got)


def available_bytes() -> int:
    """Memory that the system can give without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
