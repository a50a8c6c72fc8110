"""A few of what runs stand for all of it."""

from dataclasses import fields

import pytest

from pengserve.planners.types.ages import AGES, NUM_AGES, sampled
from pengserve.planners.types.snapshot import InstanceStats


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 100, 1000])
def test_a_sample_is_spread_over_all_that_runs(count: int) -> None:
    found = sampled(range(count))
    assert len(found) == NUM_AGES and found == sorted(found)
    middles = [(place + 0.5) * count / NUM_AGES for place in range(NUM_AGES)]
    assert all(0.0 <= middle - at < 1.0 for middle, at in zip(middles, found, strict=True))


def test_where_nothing_runs_there_is_no_sample() -> None:
    assert sampled([]) == []


def test_each_has_a_place_in_an_instance_s_load() -> None:
    assert {f.name for f in fields(InstanceStats) if f.name.startswith("age_")} == set(AGES)
