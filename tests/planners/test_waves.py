"""Laws of waves: none needs more blocks than there are, and nobody is given up or left behind who has room."""

from collections.abc import Sequence
from itertools import combinations

from hypothesis import assume, given
from hypothesis import strategies as st

from pengserve.planners.waves import MAX_SPLIT_TOKENS, MAX_WAVE_TOKENS, Mover, Wave, merge_wave, split_wave

BLOCK = 16  # tokens of a block of `dp`


def mover(index: int, ranks: int | tuple[int, ...], num_tokens: int, size: int, shared: tuple[int, ...] = ()) -> Mover:
    """A request of so many tokens of a group of `size`, whose blocks hold `size` times as many; some are shared.

    It comes from one rank, or from a narrower group of some.
    """
    ranks = (ranks,) if isinstance(ranks, int) else ranks
    return Mover(
        request_id=str(index),
        ranks=ranks,
        num_tokens=num_tokens,
        num_needed=-(-(num_tokens + 1) // (size * BLOCK)),
        num_own=max(0, -(-num_tokens // (len(ranks) * BLOCK)) - len(shared)),
        shared=shared,
    )


PARTS = {
    2: (((0,), (1,)),),
    4: (((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((0, 1), (2,), (3,)), ((0,), (1,), (2, 3))),
}


@st.composite
def merges(draw: st.DrawFn, most_tokens: int = 4_000, most: int = 12) -> tuple[list[Mover], list[int]]:
    size = draw(st.sampled_from([2, 4]))
    free = draw(st.lists(st.integers(0, 60), min_size=size, max_size=size))
    shares = st.lists(st.integers(1, 4), max_size=3, unique=True).map(tuple)
    one = st.tuples(st.sampled_from(draw(st.sampled_from(PARTS[size]))), st.integers(1, most_tokens), shares)
    drawn = draw(st.lists(one, max_size=most))
    return [mover(index, ranks, tokens, size, shared) for index, (ranks, tokens, shared) in enumerate(drawn)], free


def after(
    free: Sequence[int], present: Sequence[Mover], moving: Sequence[Mover], given_up: Sequence[Mover]
) -> list[int]:
    """Free blocks of each member once these are where they go, counted block by block."""

    def held(movers: Sequence[Mover], rank: int) -> int:
        mine = [m for m in movers if rank in m.ranks]
        return sum(m.num_own for m in mine) + len({block for m in mine for block in m.shared})

    gone = {m.request_id for m in (*moving, *given_up)}
    stay = [m for m in present if m.request_id not in gone]
    needed = sum(m.num_needed for m in moving)
    return [count + held(present, rank) - held(stay, rank) - needed for rank, count in enumerate(free)]


def all_waves(coming: list[Mover], free: list[int]) -> list[tuple[Wave, list[int]]]:
    """Wave after wave, and what is free after each."""
    found, left = [], tuple(coming)
    while left:
        wave = merge_wave(left, free)
        free = after(free, left, wave.moving, wave.given_up)
        assert sorted(m.request_id for m in (*wave.moving, *wave.given_up, *wave.left)) == sorted(
            m.request_id for m in left
        )
        assert wave.moving or not wave.left
        found.append((wave, free))
        left = wave.left
    return found


@given(merges(most_tokens=MAX_WAVE_TOKENS))
def test_after_each_wave_no_member_is_short_of_blocks(merge: tuple[list[Mover], list[int]]) -> None:
    assert all(min(free) >= 0 for wave, free in all_waves(*merge) if wave.moving)


@given(merges(most_tokens=MAX_WAVE_TOKENS, most=20))
def test_what_a_member_sends_of_a_wave_is_bounded(merge: tuple[list[Mover], list[int]]) -> None:
    for wave, _ in all_waves(*merge):
        for rank in range(4):
            assert sum(m.num_tokens / len(m.ranks) for m in wave.moving if rank in m.ranks) <= MAX_WAVE_TOKENS


@given(merges(most_tokens=800))
def test_nobody_is_given_up_where_all_have_room(merge: tuple[list[Mover], list[int]]) -> None:
    coming, free = merge
    assume(min(after(free, coming, coming, [])) >= 0)
    assert all(not wave.given_up for wave, _ in all_waves(coming, free))


@given(merges(most_tokens=800, most=6))
def test_where_one_must_be_given_up_few_are(merge: tuple[list[Mover], list[int]]) -> None:
    """At most one more than there must be of requests of about one size."""
    coming, free = merge
    coming = [m for m in coming if m.num_tokens >= 500 and not m.shared]
    num_given_up = sum(len(wave.given_up) for wave, _ in all_waves(coming, free))
    fewest = next(
        count
        for count in range(len(coming) + 1)
        for lost in combinations(coming, count)
        if min(after(free, coming, [m for m in coming if m not in lost], lost)) >= 0
    )
    assert num_given_up <= fewest + 1


def test_two_members_without_a_free_block_live_on_what_their_waves_free() -> None:
    coming = [mover(index, index % 2, 31 * BLOCK - 1, 2) for index in range(8)]  # 31 blocks, and 16 of the group's
    assert merge_wave(coming, [0, 0]).given_up == (coming[-1],), "eight need 128 of 124 blocks"
    wave = merge_wave(coming, [4, 4])
    assert (len(wave.moving), wave.given_up) == (8, ())


def test_full_pairs_live_on_what_their_waves_free_at_both_members() -> None:
    """As many bytes before and after, and not one block to spare."""
    coming = [mover(index, ((0, 1), (2, 3))[index % 2], 12 * BLOCK - 1, 4) for index in range(8)]  # 6 blocks, then 3
    wave = merge_wave(coming, [0, 0, 0, 0])
    assert (len(wave.moving), wave.given_up, wave.left) == (8, (), ())


def test_a_full_member_is_relieved_by_an_empty_one() -> None:
    coming = [mover(index, 0, 10 * BLOCK, 2) for index in range(6)]
    wave = merge_wave(coming, [0, 60])
    assert (len(wave.moving), wave.given_up, wave.left) == (6, (), ())


def test_long_requests_go_one_of_each_member_at_a_time() -> None:
    num_tokens = MAX_WAVE_TOKENS - 1
    coming = [mover(index, index // 3, num_tokens, 2) for index in range(6)]
    waves = [wave for wave, _ in all_waves(coming, [2, 2])]
    assert [sorted(m.ranks for m in wave.moving) for wave in waves] == [[(0,), (1,)]] * 3


def test_who_came_last_is_given_up_where_no_room_is_left() -> None:
    coming = [mover(0, 0, 100 * BLOCK, 2), mover(1, 0, 8 * BLOCK, 2), mover(2, 1, 8 * BLOCK, 2)]
    waves = [wave for wave, _ in all_waves(coming, [0, 52])]  # 51 blocks of each for the first, 5 for the others
    assert [[m.request_id for m in wave.moving] for wave in waves] == [["0", "2"], []]
    assert [m.request_id for m in waves[-1].given_up] == ["1"]


def test_the_blocks_of_who_is_given_up_are_there_for_the_others() -> None:
    coming = [mover(index, index % 2, 9 * BLOCK, 2) for index in range(4)]  # 9 blocks, and 5 of each in the group
    waves = [wave for wave, _ in all_waves(coming, [1, 1])]
    assert [[m.request_id for m in wave.moving] for wave in waves] == [["0", "1"], ["2"]]
    assert [m.request_id for wave in waves for m in wave.given_up] == ["3"]


@given(
    st.lists(st.tuples(st.integers(1, MAX_SPLIT_TOKENS), st.integers(1, 40)), max_size=20),
    st.lists(st.integers(0, 60), min_size=2, max_size=4),
)
def test_a_split_takes_what_there_is_and_leaves_only_what_has_no_room(
    leaving: list[tuple[int, int]], free: list[int]
) -> None:
    room, num_tokens = list(free), 0
    for (tokens, needed), rank in zip(leaving, split_wave(leaving, free), strict=True):
        if rank is None:
            assert needed > max(room) or num_tokens > MAX_SPLIT_TOKENS
            continue
        assert room[rank] == max(room), "where most blocks are free"
        room[rank] -= needed
        num_tokens += tokens
        assert room[rank] >= 0
    assert num_tokens <= 2 * MAX_SPLIT_TOKENS
