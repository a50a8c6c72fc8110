"""Laws of the token deposit: when tokens are due, and how deep it is."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.deposit import Deposit

# (pause before a step in ms, tokens that it computes); whole numbers, so that sums are exact
STEPS = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 3)), min_size=1, max_size=40)


def run(interval_ms: int, steps: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """(computed, due) of each token, in milliseconds."""
    deposit, now_ms, tokens = Deposit(float(interval_ms)), 0.0, []
    for pause_ms, count in steps:
        now_ms += pause_ms
        tokens += [(now_ms, due_ms) for due_ms in deposit.add(count, now_ms)]
    return tokens


@given(interval_ms=st.integers(1, 200), steps=STEPS)
def test_one_token_an_interval_while_there_are_more(interval_ms: int, steps: list[tuple[int, int]]) -> None:
    tokens = run(interval_ms, steps)
    assert tokens[0][0] == tokens[0][1], "the first token is not held"
    for (_, before_ms), (computed_ms, due_ms) in itertools.pairwise(tokens):
        assert due_ms >= computed_ms
        assert due_ms - before_ms >= interval_ms, "never early"
        if due_ms > computed_ms:
            assert due_ms == before_ms + interval_ms, "and never later than it must be"


@given(interval_ms=st.integers(1, 200), steps=STEPS, then_ms=st.integers(0, 2000))
def test_the_depth_is_what_was_computed_and_is_not_due(
    interval_ms: int, steps: list[tuple[int, int]], then_ms: int
) -> None:
    deposit, now_ms, due = Deposit(float(interval_ms)), 0.0, []
    for pause_ms, count in steps:
        now_ms += pause_ms
        due += list(deposit.add(count, now_ms))
    now_ms += then_ms
    assert deposit.depth(now_ms) == sum(due_ms > now_ms for due_ms in due)
    slack_ms = deposit.slack_s(now_ms)
    assert slack_ms == due[-1] + interval_ms - now_ms


def test_a_paused_stream_lives_on_its_deposit() -> None:
    """Figure 5 of the paper in small: ten tokens made in 10 ms each, then a pause of 300 ms, at an SLO of 50 ms."""
    steps = [(10, 1)] * 10 + [(300, 1)] + [(10, 1)] * 3
    paced = [due_ms for _, due_ms in run(50, steps)]
    assert max(b - a for a, b in itertools.pairwise(paced)) == 50
    late = [(10, 1)] * 10 + [(800, 1), (10, 1)]
    gaps = [b - a for (_, a), (_, b) in zip(run(50, late), run(50, late)[1:], strict=False)]
    assert gaps[9] == 800 - (9 * 50 - 90) and gaps[10] == 50, "it is late once, and the intervals count on from there"


def test_an_interval_of_nothing_holds_nothing() -> None:
    deposit = Deposit(0.0)
    assert list(deposit.add(3, 7.0)) == [7.0] * 3 and deposit.depth(7.0) == 0
    assert Deposit(1.0).depth(5.0) == 0 and Deposit(1.0).slack_s(5.0) == 0.0
