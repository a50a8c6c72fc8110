"""Laws of the CPU backend: what is not mapped kills, a half-done call is undone, and no flag changes what is seen."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pengserve.planners.types.errors import StepError
from pengserve.replicas.memory.arena import cpu
from pengserve.replicas.memory.arena.arena import Arena, Region
from pengserve.replicas.memory.arena.cpu import CpuBackend
from tests.replicas.memory.arena.worlds import PAGE, system_chunks

CHUNK = 64 << 10
HUGE = 2 << 20


def test_reading_what_is_not_mapped_dies() -> None:
    command = [sys.executable, "-m", "tests.replicas.memory.arena.late_reads"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == {
        "never_mapped": signal.SIGSEGV,
        "mapped": 0,
        "unmapped": signal.SIGSEGV,
        "moved_away": signal.SIGSEGV,
        "moved_back": 0,
        "closed": signal.SIGSEGV,
    }


def test_a_map_that_fails_halfway_leaves_nothing_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(CpuBackend(), 8 * CHUNK, CHUNK)
    a, b = (arena.reserve(8 * CHUNK, name) for name in "ab")
    arena.map(a, 0, 8)
    for index in (1, 3, 5):
        arena.unmap(a, index, index + 1)  # the free chunks lie apart: a call each
    real, calls = cpu._mmap, []

    def third_fails(*arguments: int) -> int:
        calls.append(arguments)
        if len(calls) == 3:
            raise StepError("no more maps")
        return real(*arguments)

    monkeypatch.setattr(cpu, "_mmap", third_fails)
    with pytest.raises(StepError, match="no more maps"):
        arena.map(b, 0, 3)
    assert len(calls) == 4  # two maps, the refused one, and the unmap of all
    assert system_chunks(b, CHUNK) == {}
    assert arena.check() == () and arena.num_free == 3
    monkeypatch.undo()
    arena.map(b, 0, 3)
    assert sorted(system_chunks(b, CHUNK)) == [0, 1, 2]


def test_what_the_system_refuses_is_said_in_a_sentence() -> None:
    backend = CpuBackend()
    backend.create(1, CHUNK)
    with pytest.raises(StepError, match=r"mmap of .* failed: Cannot allocate memory"):
        backend.reserve(1 << 60)


@pytest.mark.parametrize("chunk_bytes", [CHUNK, HUGE])
@pytest.mark.parametrize("populate", [True, False])
@pytest.mark.parametrize("huge_pages", [True, False])
def test_no_flag_changes_what_is_seen(chunk_bytes: int, populate: bool, huge_pages: bool) -> None:
    arena = Arena(CpuBackend(populate=populate, huge_pages=huge_pages), 4 * chunk_bytes, chunk_bytes)
    a, b = (arena.reserve(4 * chunk_bytes, name) for name in "ab")
    arena.map(a, 0, 4)
    numbers = torch.arange(chunk_bytes // 2, dtype=torch.int64)
    a.tensor(torch.int64)[:] = numbers
    arena.move(a, (1, 3), b, 2)
    assert torch.equal(b.tensor(torch.int64)[chunk_bytes // 4 :], numbers[chunk_bytes // 8 : 3 * chunk_bytes // 8])


def test_chunks_of_huge_pages_lie_on_them() -> None:
    arena = Arena(CpuBackend(), 2 * HUGE, HUGE)
    assert [arena.reserve(HUGE, str(n)).address % HUGE for n in range(5)] == [0] * 5


def smaps(region: Region, field: str) -> int:
    """Bytes that the kernel counts as `field` in the mapping that begins at `region`."""
    _, _, entry = Path("/proc/self/smaps").read_text().partition(f"\n{region.address:x}-")
    return int(entry.partition(f"\n{field}:")[2].split()[0]) << 10


def test_memory_that_moved_still_is_huge_pages() -> None:
    backend = CpuBackend()
    arena = Arena(backend, 4 * HUGE, HUGE)
    if backend.page_bytes != HUGE:
        pytest.skip("this system gives no huge pages")
    a, b = (arena.reserve(8 * HUGE, name) for name in "ab")
    arena.map(a, 0, 4)
    arena.move(a, (1, 4), b, 0)
    assert smaps(b, "ShmemPmdMapped") == smaps(b, "Rss") == 3 * HUGE  # and the page table is filled already


def test_small_pages_serve_where_there_are_no_huge_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_MADV_COLLAPSE", 9999)  # as an old kernel takes it
    backend = CpuBackend()
    arena = Arena(backend, 4 * HUGE, HUGE)
    region = arena.reserve(4 * HUGE, "r")
    arena.map(region, 0, 4)
    assert backend.page_bytes == PAGE
    assert smaps(region, "Rss") == 0  # who touches a page fills its entry
    region.tensor(torch.uint8).fill_(1)
    assert smaps(region, "Rss") == 4 * HUGE and smaps(region, "ShmemPmdMapped") == 0


def test_all_memory_is_there_from_the_start() -> None:
    for chunk_bytes in (CHUNK, HUGE):
        backend = CpuBackend()
        arena = Arena(backend, 5 * chunk_bytes, chunk_bytes)
        assert backend._fd is not None
        assert os.fstat(backend._fd).st_blocks * 512 == 5 * chunk_bytes
        arena.close()


def test_new_memory_is_zero() -> None:
    arena = Arena(CpuBackend(), 4 * HUGE, HUGE)
    region = arena.reserve(4 * HUGE, "r")
    arena.map(region, 0, 4)
    assert not region.tensor(torch.uint8).any()
