"""Laws of the figures that benchmarks share."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.figures import complete, longest_gap_s, mean, percentile, ratio, silence_s, tpots_s, ttfts_s
from tests.benchmarks.answers import answer


def test_an_answer_with_an_error_has_no_figures() -> None:
    answers = [answer(1.0, 2.0), answer(5.0, 9.0, error="lost")]
    assert complete(answers) == answers[:1]
    assert ttfts_s(answers) == [1.0]
    assert tpots_s(answers) == [1.0]


def test_the_first_token_counts_from_sending_and_the_others_from_the_first() -> None:
    assert ttfts_s([answer(1.5, 2.0, sent_s=1.0)]) == [0.5]
    assert tpots_s([answer(1.0, 2.0, tokens=5)]) == [0.25]  # an event may hold more than one token


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    assert tpots_s([answer(3.0)]) == []


def test_the_longest_gap_is_between_two_texts_and_not_before_the_first() -> None:
    assert longest_gap_s(answer(5.0, 5.5, 8.0, 8.25)) == 2.5
    assert longest_gap_s(answer(3.0)) == 0.0


def test_a_server_is_silent_while_it_has_requests_and_sends_nothing() -> None:
    early, late = answer(1.0, 2.0), answer(31.0, 32.0, sent_s=30.0)
    assert silence_s([]) == 0.0
    assert silence_s([early, late]) == 1.0  # with nothing to do it may be silent
    still = answer(1.5, 29.0, sent_s=0.5)
    assert silence_s([early, still, late]) == 27.0
    assert silence_s([early, still, answer(20.0, 21.0, sent_s=15.0)]) == 18.0  # new requests break no silence
    other = answer(*range(1, 30), server=1)
    assert silence_s([other]) == 1.0
    assert silence_s([other, early, still]) == 27.0  # each server for itself


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_mean_and_percentiles_lie_within_the_values(values: list[float]) -> None:
    middle = (mean(values), *(percentile(values, percent) for percent in (0, 50, 99)))
    assert all(min(values) <= figure <= max(values) or figure == pytest.approx(max(values)) for figure in middle)
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)


def test_of_nothing_there_are_no_figures() -> None:
    assert math.isnan(mean([])) and math.isnan(percentile([], 50))


def test_a_ratio_to_zero_is_no_number() -> None:
    assert math.isnan(ratio(1.0, 0.0))
    assert ratio(1.0, 2.0) == 0.5
