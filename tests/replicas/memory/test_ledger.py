"""Laws of the ledger: every block has one owner, and a table gives back what it was given."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.replicas.memory.ledger import BlockLedger, BlockTable


@given(st.lists(st.tuples(st.integers(1, 15), st.sampled_from(["dp", "tp2", "tp4"]), st.sampled_from(["dp", "tp2"]))))
def test_blocks_are_conserved(moves: list[tuple[int, str, str]]) -> None:
    ledger = BlockLedger(16, "dp")
    owners = dict.fromkeys(range(1, 16), "dp")
    for block_id, source, target in moves:
        if owners[block_id] == source:
            ledger.move([block_id], source, target)
            owners[block_id] = target
        else:
            with pytest.raises(ValueError, match="belongs to"):
                ledger.move([block_id], source, target)
        assert ledger.check() == ()
        assert sum(map(ledger.num_leased, ("dp", "tp2", "tp4"))) == 15
        for lane in ("dp", "tp2", "tp4"):
            assert ledger.num_leased(lane) == sum(owner == lane for owner in owners.values())


def test_the_null_block_is_nobodys() -> None:
    with pytest.raises(ValueError, match="block 0"):
        BlockLedger(4, "dp").move([0], "dp", "tp2")


def test_a_lane_without_blocks_gives_none_back() -> None:
    ledger = BlockLedger(4, "dp")
    ledger.move([], "tp2", "dp")
    assert ledger.check() == ()
    assert ledger.num_leased("dp") == 3


def test_a_table_gives_back_what_it_was_given() -> None:
    table = BlockTable(8)
    table.lease([1, 5, 2], [7, 3, 4])
    assert table.physical([2, 1, 0]) == [4, 7, 0]
    assert table.leased() == [1, 2, 5]
    with pytest.raises(ValueError, match="cannot take"):
        table.lease([5], [6])
    assert table.release([5, 1]) == [3, 7]
    assert table.leased() == [2]
    with pytest.raises(ValueError, match="not leased"):
        table.release([5])
