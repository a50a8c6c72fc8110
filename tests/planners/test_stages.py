"""Laws of how layers are cut into stages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.stages import stage_layers
from pengserve.planners.types.errors import UnsupportedShapeError


@given(num_stages=st.integers(1, 16), more=st.integers(0, 120))
def test_each_layer_is_in_one_stage_and_sizes_differ_by_one(num_stages: int, more: int) -> None:
    num_layers = num_stages + more
    ranges = stage_layers(num_layers, num_stages)
    assert [layer for first, stop in ranges for layer in range(first, stop)] == list(range(num_layers))
    sizes = [stop - first for first, stop in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes), "the last stage samples as well"


def test_a_stage_without_layers_is_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="3 layers do not fill 4 stages"):
        stage_layers(3, 4)
