"""The length predictor: bounds of what it counted, narrower kinds first, and that it forgets."""

import random

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.lengths import (
    LOW,
    MAX_KINDS,
    MIN_ANSWERS,
    RATIO,
    LengthPredictor,
    LengthRange,
    length_class,
    lower_bound,
)

MOST = 1 << 16


@given(length=st.integers(1, 1 << 20))
def test_a_length_is_in_its_class(length: int) -> None:
    index = length_class(length)
    assert lower_bound(index) <= length < lower_bound(index + 1) or lower_bound(index) == lower_bound(index + 1)
    assert length <= max(2, lower_bound(index) * RATIO + 1)


def test_nothing_known_promises_one_token() -> None:
    assert LengthPredictor().predict("default", 100, 7, MOST) == LengthRange(low=8, median=8)
    few = LengthPredictor()
    for _ in range(MIN_ANSWERS - 1):
        few.learn("default", 100, 500)
    assert few.predict("default", 100, 0, MOST) == LengthRange(low=1, median=1)


def test_the_bounds_are_percentiles_of_those_that_were_longer() -> None:
    predictor = LengthPredictor()
    for length in [10] * 10 + [100] * 20 + [1000] * 10:
        predictor.learn("default", 64, length)

    def near(found: int, wanted: int) -> bool:
        return wanted / RATIO <= found <= wanted

    first = predictor.predict("default", 64, 0, MOST)
    assert near(first.low, 10) and near(first.median, 100)
    later = predictor.predict("default", 64, 50, MOST)
    assert near(later.low, 100) and near(later.median, 100)
    last = predictor.predict("default", 64, 200, MOST)
    assert near(last.low, 1000) and near(last.median, 1000)
    assert predictor.predict("default", 64, 200, 300) == LengthRange(low=300, median=300), "it may have no more"
    assert predictor.predict("default", 64, 5000, MOST) == LengthRange(low=5001, median=5001)


def test_a_narrower_kind_counts_first() -> None:
    predictor = LengthPredictor()
    for _ in range(MIN_ANSWERS):
        predictor.learn("chat", 16, 10)
        predictor.learn("batch", 16, 1000)
        predictor.learn("batch", 60_000, 4000)
    assert predictor.predict("chat", 16, 0, MOST).median <= 10
    assert 800 <= predictor.predict("batch", 16, 0, MOST).median <= 1000
    assert 3200 <= predictor.predict("batch", 60_000, 0, MOST).median <= 4000
    assert 800 <= predictor.predict("batch", 700, 0, MOST).median <= 4000, "that of the class, where the prompt is new"
    assert predictor.predict("other", 5, 0, MOST).median >= 8, "and that of all, where the class is"


def test_it_follows_the_traffic() -> None:
    predictor = LengthPredictor()
    for _ in range(2000):
        predictor.learn("default", 64, 10)
    for _ in range(1000):
        predictor.learn("default", 64, 1000)
    assert predictor.predict("default", 64, 0, MOST).median >= 800


def test_kinds_are_bounded() -> None:
    predictor = LengthPredictor()
    for number in range(10 * MAX_KINDS):
        predictor.learn(f"c{number}", 10, 10)
    assert len(predictor._counts) <= MAX_KINDS


def test_it_is_calibrated_on_lengths_of_real_shape() -> None:
    """Log-normal lengths, as those of public traces: the low bound holds for 75 %, and half are below the median."""
    source, predictor, above_low, above_median, count = random.Random(1), LengthPredictor(), 0, 0, 0
    for number in range(4000):
        length = max(1, int(source.lognormvariate(5, 1)))
        if number > 200:
            found = predictor.predict("default", 100, 0, MOST)
            above_low += length >= found.low
            above_median += length >= found.median
            count += 1
        predictor.learn("default", 100, length)
    assert 1 - LOW - 0.05 <= above_low / count <= 1 - LOW + 0.1, above_low / count
    assert 0.45 <= above_median / count <= 0.6, above_median / count
