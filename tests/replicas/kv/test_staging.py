"""Laws of the ring of staged layers, and of how many blocks leave each layer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.replicas.kv.staging import levels, turns

COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=8)


@given(COUNTS, st.integers(0, 10))
def test_no_cell_is_written_before_the_layer_that_had_it_was_read(counts: list[int], spare: int) -> None:
    num_cells = max(counts) + spare
    last: dict[int, int] = {}  # cell: the layer that has it
    for turn in turns(counts, num_cells):
        places = turn.places.tolist()
        assert len(set(places)) == len(places) == counts[turn.layer]
        before = [last[place] for place in places if place in last]
        assert turn.after == max(before, default=None)
        last |= dict.fromkeys(places, turn.layer)


@given(COUNTS)
def test_with_cells_for_all_no_layer_waits(counts: list[int]) -> None:
    found = turns(counts, sum(counts))
    assert all(turn.after is None for turn in found)
    assert [turn.layer for turn in found] == [layer for layer, count in enumerate(counts) if count]


@given(st.integers(1, 4), COUNTS)
def test_two_layers_worth_of_cells_let_a_layer_be_copied_while_another_computes(count: int, layers: list[int]) -> None:
    found = turns([count] * len(layers), 2 * count)
    assert [turn.after for turn in found] == [None, None, *range(len(layers) - 2)][: len(layers)]


def test_a_layer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="layer 1 stages 3 blocks"):
        turns([1, 3], 2)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=6),
    st.integers(0, 12),
    st.sampled_from([0, 1, 2]),
)
def test_what_leaves_is_enough_and_no_more_than_level(layers: list[tuple[int, int]], free: int, areas: int) -> None:
    counts, movable = (np.array(column) for column in zip(*layers, strict=True))
    leaving = levels(counts, movable, free, areas)
    tops = [int(counts.max()) + extra for extra in range(int(movable.max()) + int(counts.max()) + 2)]
    able = [
        top
        for top in tops
        if free + np.clip(top - counts, 0, movable).sum() >= areas * (counts + np.clip(top - counts, 0, movable)).max()
    ]
    if free >= areas * counts.max():
        assert leaving is not None and not leaving.any()
    elif not able:
        assert leaving is None
    else:
        assert leaving is not None and leaving.tolist() == np.clip(able[0] - counts, 0, movable).tolist()
