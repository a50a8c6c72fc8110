"""Laws of a lane's table: it gives back what it was given, in each layer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.replicas.kv.ledger import Cells
from pengserve.replicas.kv.table import CellTable
from tests.support.effort import examples

LAYERS, BLOCKS = 4, 8


def test_a_table_gives_back_what_it_was_given() -> None:
    table = CellTable(8)
    table.lease([1, 5, 2], [7, 3, 4])
    assert table.physical([2, 1, 0]) == [4, 7, 0]
    assert table.leased() == [1, 2, 5]
    with pytest.raises(ValueError, match="cannot take"):
        table.lease([5], [6])
    assert table.release([5, 1]) == [3, 7]
    assert table.leased() == [2]
    with pytest.raises(ValueError, match="not leased"):
        table.release([5])


@given(st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(1, BLOCKS - 1), st.integers(1, 90)), max_size=12))
@settings(max_examples=examples(200))
def test_each_layer_has_its_own_cells(moves: list[tuple[int, int, int]]) -> None:
    table, every = CellTable(BLOCKS), range(1, BLOCKS)
    table.lease(every, every)
    model = [dict(zip(every, every, strict=True)) for _ in range(LAYERS)]
    for layer, logical, block in moves:
        table.place(layer, LAYERS, [logical], [block])
        model[layer][logical] = block
        assert table.is_uniform == all(row == model[0] for row in model)
        for at, row in enumerate(model):
            assert table.cells(at, every) == Cells((at, at + 1), list(row.values()))
        for one in every:
            places = {row[one] for row in model}
            if len(places) == 1:
                assert table.physical([one]) == list(places)
            else:
                with pytest.raises(ValueError, match="different places"):
                    table.physical([one])
        assert table.leased() == list(every)


def test_what_is_not_leased_has_no_place() -> None:
    table = CellTable(BLOCKS)
    with pytest.raises(ValueError, match="cannot move"):
        table.place(0, LAYERS, [3], [4])
    assert table.is_uniform and table.leased() == [] and table.cells(2, []) == Cells((2, 3), [])
