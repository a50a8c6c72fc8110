"""Laws of the histogram of gaps: nothing is lost, and a run of gaps is counted as its gaps are one by one."""

from hypothesis import given
from hypothesis import strategies as st

from pengserve.simulator.engine.gaps import EDGES_S, GapCounter

seconds = st.floats(0.0, 1e5)


@given(st.lists(st.tuples(seconds, st.integers(0, 9)), max_size=30))
def test_every_gap_is_in_the_bin_that_holds_it(gaps: list[tuple[float, int]]) -> None:
    counter, expected = GapCounter(), [0] * (len(EDGES_S) - 1)
    for gap_s, count in gaps:
        counter.add(gap_s, count)
        inside = [index for index in range(len(expected)) if EDGES_S[index] <= gap_s < EDGES_S[index + 1]]
        expected[inside[0] if inside else (0 if gap_s < EDGES_S[0] else -1)] += count
    assert list(counter.gaps().counts) == expected


@given(st.floats(1e-6, 3e3), st.floats(0.0, 10.0), st.integers(0, 5), st.integers(0, 300), st.integers(1, 9))
def test_a_run_of_rising_gaps_is_counted_as_one_by_one(
    first_s: float, growth_s: float, start: int, length: int, count: int
) -> None:
    def gap_s(index: int) -> float:
        return first_s + index * growth_s

    at_once, one_by_one = GapCounter(), GapCounter()
    at_once.add_rising(gap_s, start, start + length, count)
    for index in range(start, start + length):
        one_by_one.add(gap_s(index), count)
    assert at_once.gaps() == one_by_one.gaps()


def test_a_long_run_asks_for_a_few_gaps_alone() -> None:
    asked = []

    def gap_s(index: int) -> float:
        asked.append(index)
        return 0.03 + 1e-7 * index

    GapCounter().add_rising(gap_s, 0, 100_000, 16)
    assert len(asked) < 500
