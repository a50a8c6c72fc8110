"""Laws of the free list: chunks are neither lost nor doubled, and what is taken lies together where it can."""

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from pengserve.replicas.memory.arena.free_chunks import FreeChunks, runs

CHUNKS = st.lists(st.integers(0, 31), unique=True)  # in the order in which they are given back


def only(chunks: Sequence[int]) -> FreeChunks:
    """A free list of exactly `chunks`, given back one by one."""
    free = FreeChunks(32)
    free.take(32)
    for chunk in chunks:
        free.give([chunk])
    return free


def sizes(chunks: Iterable[int]) -> list[int]:
    """Lengths of the runs of a set of chunks, longest first."""
    return sorted((count for _, _, count in runs(sorted(chunks))), reverse=True)


@given(st.lists(st.integers(0, 31)))
def test_runs_say_the_same_as_the_chunks(chunks: list[int]) -> None:
    assert [first + i for _, first, count in runs(chunks) for i in range(count)] == chunks
    assert [index for index, _, _ in runs(chunks)] == [
        index for index in range(len(chunks)) if index == 0 or chunks[index] != chunks[index - 1] + 1
    ]


@given(CHUNKS, st.integers(0, 32))
def test_what_is_taken_was_free_and_is_no_more(chunks: list[int], count: int) -> None:
    free = only(chunks)
    count = min(count, len(chunks))
    taken = free.take(count)
    assert len(set(taken)) == len(taken) == count
    assert set(taken) <= set(chunks)
    assert set(free) == set(chunks) - set(taken)
    assert len(free) == len(chunks) - count


@given(CHUNKS, CHUNKS)
def test_many_are_given_back_as_one_by_one(first: list[int], second: list[int]) -> None:
    free, union = only(first), {*first, *second}
    free.give(set(second).difference(first))
    assert list(free) == sorted(union)
    assert free.take(len(union)) == only(sorted(union)).take(len(union))


@given(CHUNKS, st.integers(1, 32))
def test_no_choice_of_chunks_has_fewer_runs(chunks: list[int], count: int) -> None:
    count = min(count, len(chunks))
    longest, fewest, covered = sizes(chunks), 0, 0
    while covered < count:
        covered += longest[fewest]
        fewest += 1
    assert len(list(runs(only(chunks).take(count)))) == fewest


def test_the_shortest_run_that_serves_is_taken() -> None:
    free = only([0, 1, 2, 3, 10, 11, 20, 21, 22])
    assert free.take(2) == [10, 11]
    assert free.take(3) == [20, 21, 22]


@given(CHUNKS, st.integers(0, 32))
def test_a_list_that_begins_empty_is_as_one_that_has_become_so(chunks: list[int], count: int) -> None:
    free, other = FreeChunks(0), only(chunks)
    assert list(free) == [] and len(free) == 0
    for chunk in chunks:
        free.give([chunk])
    count = min(count, len(chunks))
    taken = other.take(count)
    assert free.take(count) == taken
    for chunk in taken[::2]:
        free.give([chunk])
        other.give([chunk])
    assert list(free) == list(other) == sorted(free)
