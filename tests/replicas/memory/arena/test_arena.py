"""Laws of the arena that need no sequence: refusals change nothing, contents travel, addresses stay."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pengserve.planners.types.errors import ConfigError, EngineError, StepError
from pengserve.replicas.memory.arena.arena import Arena, Region
from pengserve.replicas.memory.arena.cpu import CpuBackend
from pengserve.replicas.memory.arena.open import open_arena
from tests.replicas.memory.arena.worlds import PAGE, Refusing, system_chunks

CPU = torch.device("cpu")
CHUNK = 64 << 10


@pytest.fixture
def arena() -> Iterator[Arena]:
    """Eight chunks of 64 KiB."""
    arena = open_arena(CPU, 8 * CHUNK, CHUNK)
    yield arena
    arena.close()


def state(arena: Arena) -> object:
    """All that a refused call must leave as it is."""
    books = [(region.name, region.address, region.mapped) for region in arena.regions]
    return books, arena.num_free, arena.counters, [system_chunks(region, CHUNK) for region in arena.regions]


def memory_files() -> set[int]:
    """Inodes of the arenas' memory that this process has open; no other test's sockets: they close when they like."""
    inodes = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own, and what is closed meanwhile
            if "pengserve-arena" in os.readlink(file):
                inodes.add(file.stat().st_ino)
    return inodes


def three_regions(arena: Arena) -> tuple[Region, Region, Region]:
    """[0, 3) of `a` and [0, 2) of `b` are mapped, `c` is empty; each has eight chunks."""
    a, b, c = (arena.reserve(8 * CHUNK, name) for name in "abc")
    arena.map(a, 0, 3)
    arena.map(b, 0, 2)
    return a, b, c


def refused_calls(arena: Arena) -> list[tuple[type[Exception], Callable[[], object]]]:
    """Calls that cannot be, and how they are refused."""
    a, b, c = three_regions(arena)
    return [
        (StepError, lambda: arena.map(c, 0, 4)),  # three are free
        (ValueError, lambda: arena.map(a, 2, 4)),  # one is mapped
        (ValueError, lambda: arena.map(a, 7, 9)),
        (ValueError, lambda: arena.map(a, 5, 4)),
        (ValueError, lambda: arena.unmap(a, 2, 4)),  # one is not mapped
        (ValueError, lambda: arena.move(a, (0, 4), c, 0)),
        (ValueError, lambda: arena.move(a, (0, 3), b, 1)),
        (ValueError, lambda: arena.move(a, (0, 3), a, 2)),
        (ValueError, lambda: arena.move(a, (0, 3), c, 6)),
        (ValueError, lambda: arena.move(a, (-1, 2), c, 0)),
        (ValueError, lambda: arena.map(open_arena(CPU, CHUNK, CHUNK).reserve(CHUNK, "other"), 0, 1)),
        (ValueError, lambda: arena.reserve(0, "nothing")),
    ]


def test_an_arena_grows_by_free_chunks_and_what_is_mapped_stays(arena: Arena) -> None:
    a, _, c = three_regions(arena)
    words = a.tensor(torch.int64)[: 3 * CHUNK // 8]
    words.fill_(7)
    arena.grow(4)
    assert (arena.num_chunks, arena.num_free) == (12, 7) and arena.check() == ()
    arena.map(c, 0, 7)
    assert bool((words == 7).all()) and arena.check() == ()
    with pytest.raises(ConfigError):
        arena.grow(1 << 40)
    assert arena.num_chunks == 12 and arena.check() == ()


@pytest.mark.parametrize("number", range(12))
def test_a_refused_call_changes_nothing(arena: Arena, number: int) -> None:
    error, call = refused_calls(arena)[number]
    before = state(arena)
    with pytest.raises(error):
        call()
    assert state(arena) == before
    assert arena.check() == ()


def test_too_few_free_chunks_are_named(arena: Arena) -> None:
    _, _, c = three_regions(arena)
    with pytest.raises(StepError, match="3 chunks are free, 4 wanted for c"):
        arena.map(c, 0, 4)


@pytest.mark.parametrize("answers", [[False], [True, False]])
def test_a_move_that_the_system_refuses_changes_nothing(answers: list[bool]) -> None:
    backend = Refusing(CpuBackend())
    arena = Arena(backend, 8 * CHUNK, CHUNK)
    a, _, c = three_regions(arena)
    a.tensor(torch.uint8)[: 3 * CHUNK] = 5
    before = state(arena)[:2]
    backend.answers = answers
    with pytest.raises(StepError, match="the system said no"):
        arena.move(a, (0, 3), c, 0)
    assert state(arena)[:2] == before
    assert system_chunks(c, CHUNK) == {}
    assert (a.tensor(torch.uint8)[: 3 * CHUNK] == 5).all()


def test_a_move_that_can_neither_go_on_nor_back_says_so() -> None:
    backend = Refusing(CpuBackend())
    arena = Arena(backend, 8 * CHUNK, CHUNK)
    a, _, c = three_regions(arena)
    backend.answers = [True, False, False]
    with pytest.raises(EngineError, match="the rollback failed too"):
        arena.move(a, (0, 3), c, 0)


def test_contents_travel_and_tensors_stay(arena: Arena) -> None:
    a, b, c = three_regions(arena)
    shown = {region.name: region.tensor(torch.float32) for region in (a, b, c)}
    places = {name: tensor.data_ptr() for name, tensor in shown.items()}
    per_chunk = CHUNK // 4
    shown["a"][: 3 * per_chunk] = torch.arange(3.0 * per_chunk)
    shown["b"][: 2 * per_chunk] = -1
    arena.move(a, (1, 3), b, 2)
    assert torch.equal(shown["b"][2 * per_chunk : 4 * per_chunk], torch.arange(1.0 * per_chunk, 3.0 * per_chunk))
    assert (shown["b"][: 2 * per_chunk] == -1).all()
    arena.move(b, (2, 4), a, 1)
    assert torch.equal(shown["a"][: 3 * per_chunk], torch.arange(3.0 * per_chunk))
    for region in (a, b, c):
        assert region.tensor(torch.float32).data_ptr() == places[region.name] == region.address


def test_the_kernel_has_what_the_books_say(arena: Arena) -> None:
    a, b, c = three_regions(arena)
    arena.move(a, (1, 2), c, 5)
    arena.unmap(b, 0, 1)
    arena.map(c, 0, 3)
    chunks = [system_chunks(region, CHUNK) for region in (a, b, c)]
    assert [sorted(found) for found in chunks] == [[0, 2], [1], [0, 1, 2, 5]]
    assert len({chunk for found in chunks for chunk in found.values()}) == 7


def test_a_region_shows_all_that_it_reserved(arena: Arena) -> None:
    region = arena.reserve(5 * CHUNK - 1, "r")
    assert region.num_chunks == 5
    assert region.mapped == () and region.mapped_bytes == 0
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        assert region.tensor(dtype).shape == (5 * CHUNK // dtype.itemsize,)
    assert region.tensor(torch.bfloat16).dtype == torch.bfloat16


def test_neighbours_are_mapped_by_one_call(arena: Arena) -> None:
    a, b = (arena.reserve(8 * CHUNK, name) for name in "ab")
    arena.map(a, 0, 8)
    assert arena.counters.map_calls == 1
    before = arena.counters
    arena.move(a, (2, 6), b, 1)
    since = arena.counters - before
    assert (since.map_calls, since.unmap_calls) == (1, 1)
    assert 0 < since.seconds < arena.counters.seconds


def test_chunks_that_lie_apart_take_a_call_each(arena: Arena) -> None:
    a, b = (arena.reserve(8 * CHUNK, name) for name in "ab")
    arena.map(a, 0, 8)
    for index in range(4):
        arena.move(a, (2 * index, 2 * index + 1), b, index)
    before = arena.counters
    arena.move(b, (0, 4), b, 4)
    since = arena.counters - before
    assert (since.map_calls, since.unmap_calls) == (4, 1)


def test_nothing_wanted_is_nothing_done(arena: Arena) -> None:
    a, _, c = three_regions(arena)
    before = state(arena)
    arena.map(c, 3, 3)
    arena.unmap(a, 1, 1)
    arena.move(a, (2, 2), c, 8)
    assert state(arena) == before


@pytest.mark.parametrize(
    "num_bytes, chunk_bytes, sentence",
    [
        (8 * CHUNK, 0, "chunk_bytes is 0: choose a multiple of"),
        (8 * CHUNK, PAGE + 1, "choose a multiple of"),
        (8 * CHUNK, -PAGE, "choose a multiple of"),
        (CHUNK - 1, CHUNK, "choose at least one chunk"),
        (0, CHUNK, "choose at least one chunk"),
        (1 << 60, 1 << 40, "are available"),
    ],
)
def test_sizes_that_cannot_work_are_refused(num_bytes: int, chunk_bytes: int, sentence: str) -> None:
    files = memory_files()
    with pytest.raises(ConfigError, match=sentence):
        open_arena(CPU, num_bytes, chunk_bytes)
    assert memory_files() <= files  # fewer: an arena that nobody holds goes when Python likes


def test_a_part_of_a_chunk_is_left_out() -> None:
    arena = open_arena(CPU, 3 * CHUNK - 1, CHUNK)
    assert (arena.num_chunks, arena.num_free, arena.chunk_bytes) == (2, 2, CHUNK)


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="device meta has no arena"):
        open_arena(torch.device("meta"), CHUNK, CHUNK)


def test_check_names_a_chunk_with_two_owners(arena: Arena) -> None:
    a, b, _ = three_regions(arena)
    b._table[5] = a._table[1]
    assert arena.check() == (f"physical chunk {a._table[1]} belongs to chunk 1 of a and chunk 5 of b",)


def test_check_names_a_chunk_without_an_owner(arena: Arena) -> None:
    a, _, _ = three_regions(arena)
    lost, a._table[1] = a._table[1], None
    assert arena.check() == (f"physical chunk {lost} is neither free nor mapped",)


def test_check_names_a_chunk_that_is_free_and_used(arena: Arena) -> None:
    a, _, _ = three_regions(arena)
    arena._free.give([a._table[2]])
    assert arena.check() == (f"physical chunk {a._table[2]} belongs to the free list and chunk 2 of a",)


def test_close_gives_all_memory_back() -> None:
    others = memory_files()
    arena = open_arena(CPU, 8 * CHUNK, CHUNK)
    (own,) = memory_files() - others
    regions = three_regions(arena)
    assert any(system_chunks(region, CHUNK) for region in regions)
    arena.close()
    arena.close()
    assert not any(system_chunks(region, CHUNK) for region in regions)
    assert own not in memory_files()
    assert [region.mapped for region in regions] == [(), (), ()]
    a = regions[0]
    for call in (lambda: arena.map(a, 0, 1), lambda: arena.reserve(1, "d"), lambda: a.tensor(torch.int8)):
        with pytest.raises(ValueError, match="closed"):
            call()


def is_reserved(address: int) -> bool:
    """Whether anything of this process is at `address`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


def test_addresses_outlive_the_arena_as_long_as_a_tensor_shows_them() -> None:
    arena = open_arena(CPU, 2 * CHUNK, CHUNK)
    region = arena.reserve(2 * CHUNK, "r")
    arena.map(region, 0, 2)
    view = region.tensor(torch.float32).view(2, -1)[1]
    middle = arena.reserve(1 << 30, "other").address + (1 << 29)  # far from what others may map later
    del arena, region
    gc.collect()
    view.fill_(3)
    assert view.sum() == 3 * CHUNK / 4
    assert is_reserved(middle)
    del view
    gc.collect()
    assert not is_reserved(middle)


def test_a_closed_arena_keeps_the_addresses_of_its_tensors() -> None:
    arena = open_arena(CPU, CHUNK, CHUNK)
    region = arena.reserve(1 << 30, "r")
    tensor, address = region.tensor(torch.uint8), region.address
    arena.close()
    del arena, region
    gc.collect()
    assert is_reserved(address) and is_reserved(address + (1 << 30) - 1)
    del tensor
    gc.collect()
    assert not is_reserved(address + (1 << 29))


def test_a_mirror_shows_first_chunks_of_regions_and_owns_none(arena: Arena) -> None:
    """Up to the first chunk without memory, and no more than were asked for."""
    a, b, c = three_regions(arena)
    arena.unmap(a, 1, 2)
    mirror, before = arena.mirror(8, "mirror"), arena.num_free
    for first, region in ((0, a), (2, b), (4, c), (6, b)):
        arena.show(mirror, first, region, 1 if first == 6 else 2)
    of_a, of_b = system_chunks(a, CHUNK), system_chunks(b, CHUNK)
    assert system_chunks(mirror, CHUNK) == {0: of_a[0], 2: of_b[0], 3: of_b[1], 6: of_b[0]}
    assert arena.num_free == before and mirror not in arena.regions and arena.check() == ()
    words = b.tensor(torch.int64)[: CHUNK // 8]
    words.fill_(5)
    for chunk in (2, 6):
        assert bool((mirror.tensor(torch.int64)[chunk * CHUNK // 8 : (chunk + 1) * CHUNK // 8] == 5).all())


def test_a_mirror_follows_memory_that_moves_and_shows_nothing_that_went_elsewhere(arena: Arena) -> None:
    a, b, c = three_regions(arena)
    mirror = arena.mirror(4, "mirror")
    arena.show(mirror, 0, a, 4)
    arena.move(a, (1, 3), c, 0)
    arena.show(mirror, 0, a, 4)
    assert system_chunks(mirror, CHUNK) == {0: system_chunks(a, CHUNK)[0]}
    arena.move(b, (0, 2), a, 1)
    arena.show(mirror, 0, a, 4)
    assert system_chunks(mirror, CHUNK) == system_chunks(a, CHUNK) and len(system_chunks(a, CHUNK)) == 3
    arena.unmap(a, 0, 3)
    arena.show(mirror, 0, a, 4)
    assert system_chunks(mirror, CHUNK) == {} and arena.check() == ()


def test_to_show_what_is_shown_asks_the_system_for_nothing(arena: Arena) -> None:
    a, _, _ = three_regions(arena)
    mirror = arena.mirror(8, "mirror")
    arena.show(mirror, 0, a, 8)
    before = arena.counters
    arena.show(mirror, 0, a, 8)
    assert arena.counters == before
    arena.map(a, 3, 4)
    before = arena.counters
    arena.show(mirror, 0, a, 8)
    assert (arena.counters - before).map_calls == 1 and not (arena.counters - before).unmap_calls


@pytest.mark.parametrize("answers", [[False], [True, False]])
def test_what_the_system_refuses_to_show_can_be_shown_later(answers: list[bool]) -> None:
    """The mirror never shows memory that its books do not name."""
    backend = Refusing(CpuBackend())
    arena = Arena(backend, 8 * CHUNK, CHUNK)
    a, _, c = three_regions(arena)
    mirror = arena.mirror(4, "mirror")
    arena.show(mirror, 0, a, 3)
    arena.move(a, (0, 3), c, 0)
    arena.map(a, 0, 3)
    backend.answers = answers
    with pytest.raises(StepError, match="the system said no"):
        arena.show(mirror, 0, a, 3)
    arena.show(mirror, 0, a, 3)
    assert system_chunks(mirror, CHUNK) == system_chunks(a, CHUNK) and arena.check() == ()
    arena.close()
    assert system_chunks(mirror, CHUNK) == {}


def test_a_closed_arena_shows_nothing(arena: Arena) -> None:
    a, _, _ = three_regions(arena)
    mirror = arena.mirror(8, "mirror")
    arena.show(mirror, 0, a, 8)
    arena.close()
    assert system_chunks(mirror, CHUNK) == {}
    with pytest.raises(ValueError, match="closed"):
        arena.show(mirror, 0, a, 8)
