"""Laws of how layers are cut into stages, and of how pipelines nest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.stages import Parts, microbatches_in_flight, nests, rank_of, stage_layers, stage_of
from pengserve.planners.types.errors import UnsupportedShapeError

LAYERS = st.integers(8, 130)
PARTS = st.sampled_from([(1, 1), (2, 2), (1, 1, 2), (2, 1, 1), (1, 1, 1), (4, 2, 1, 1), (4, 4), (3, 3), (2,) * 4])


@given(num_stages=st.integers(1, 16), more=st.integers(0, 120))
def test_each_layer_is_in_one_stage_and_sizes_differ_by_one(num_stages: int, more: int) -> None:
    num_layers = num_stages + more
    ranges = stage_layers(num_layers, num_stages)
    assert [layer for first, stop in ranges for layer in range(first, stop)] == list(range(num_layers))
    sizes = [stop - first for first, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the last stage samples as well"


@given(st.integers(1, 32))
def test_each_member_has_one_stage_and_the_leader_the_last(num_stages: int) -> None:
    stages = [stage_of(rank, num_stages) for rank in range(num_stages)]
    assert sorted(stages) == list(range(num_stages)) and stages[0] == num_stages - 1
    assert [rank_of(stage, num_stages) for stage in stages] == list(range(num_stages))


@given(st.integers(1, 64), st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_the_less_of_a_processor_members_have_the_fewer_microbatches(num_stages: int, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert 1 <= microbatches_in_flight(num_stages, less) <= microbatches_in_flight(num_stages, more) <= num_stages
    assert abs(microbatches_in_flight(num_stages, more) - max(1.0, num_stages * more)) <= 0.5


def test_members_with_a_processor_each_have_a_microbatch_each() -> None:
    assert [microbatches_in_flight(stages, 1.0) for stages in (2, 4, 8)] == [2, 4, 8]
    assert [microbatches_in_flight(stages, 0.5) for stages in (2, 4, 8)] == [1, 2, 4]


@given(LAYERS, PARTS)
def test_in_the_wide_pipeline_a_member_has_some_of_the_layers_of_its_part(
    num_layers: int, sizes: tuple[int, ...]
) -> None:
    parts, num_stages = Parts(num_layers, sizes), sum(sizes)
    wide = stage_layers(num_layers, num_stages)
    for rank in range(num_stages):
        (first, stop), (low, high) = wide[stage_of(rank, num_stages)], parts.layers(rank)
        assert low <= first < stop <= high


@given(LAYERS, PARTS)
def test_each_part_has_every_layer_once(num_layers: int, sizes: tuple[int, ...]) -> None:
    parts = Parts(num_layers, sizes)
    for part, size in enumerate(sizes):
        ranks = range(parts.start(part), parts.start(part) + size)
        assert [parts.of(rank) for rank in ranks] == [part] * size
        assert sorted(i for rank in ranks for i in range(*parts.layers(rank))) == list(range(num_layers))


@pytest.mark.parametrize("sizes", [(), (2,), (1, 2, 1), (3, 1), (2, 4, 2), (1, 3)])
def test_groups_that_are_no_halves_of_halves_are_no_parts(sizes: tuple[int, ...]) -> None:
    assert not nests(sizes)
    with pytest.raises(ValueError, match="are no parts of a pipeline"):
        Parts(8, sizes)


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="3 layers do not fill 4 stages"):
        stage_layers(3, 4)
