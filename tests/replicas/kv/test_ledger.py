"""Laws of the ledger: every block has one owner, and what is in flight is counted and stays where it is."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.replicas.kv.ledger import CellLedger, Cells
from tests.support.effort import examples

LANES = ["dp", "tp2", "tp4"]
NUM_BLOCKS, NUM_LAYERS = 16, 3


@given(st.lists(st.tuples(st.integers(1, 15), st.sampled_from(LANES), st.sampled_from(["dp", "tp2"]))))
def test_blocks_are_conserved(moves: list[tuple[int, str, str]]) -> None:
    ledger = CellLedger(NUM_BLOCKS, "dp")
    owners = dict.fromkeys(range(1, NUM_BLOCKS), "dp")
    for block_id, source, target in moves:
        if owners[block_id] == source:
            ledger.move([block_id], source, target)
            owners[block_id] = target
        else:
            with pytest.raises(ValueError, match="belongs to"):
                ledger.move([block_id], source, target)
        assert ledger.check() == ()
        assert sum(map(ledger.num_leased, LANES)) == 15
        for lane in LANES:
            assert ledger.num_leased(lane) == sum(owner == lane for owner in owners.values())
            assert ledger.leased(lane) == [block for block, owner in owners.items() if owner == lane]


def test_the_null_block_is_nobodys() -> None:
    with pytest.raises(ValueError, match="block 0"):
        CellLedger(4, "dp").move([0], "dp", "tp2")


def test_a_lane_without_blocks_gives_none_back() -> None:
    ledger = CellLedger(4, "dp")
    ledger.move([], "tp2", "dp")
    assert ledger.check() == ()
    assert ledger.num_leased("dp") == 3


@st.composite
def copies(draw: st.DrawFn) -> tuple[Cells, bool]:
    """Cells, some beyond the blocks of `dp` and some named twice, and whether they are written."""
    first = draw(st.integers(0, NUM_LAYERS - 1))
    stop = draw(st.integers(first + 1, NUM_LAYERS))
    blocks = draw(st.lists(st.integers(1, NUM_BLOCKS + 4), max_size=5))
    return Cells((first, stop), blocks), draw(st.booleans())


@given(st.lists(copies(), max_size=8), st.randoms(use_true_random=False))
@settings(max_examples=examples(120))
def test_what_is_in_flight_changes_no_hands_and_keeps_its_memory(
    begun: list[tuple[Cells, bool]], chance: object
) -> None:
    ledger = CellLedger(NUM_BLOCKS, "dp")
    under_way: list[tuple[Cells, bool]] = []
    for cells, writes in begun:
        ledger.begin_copy(cells, writes=writes)
        under_way.append((cells, writes))
    chance.shuffle(under_way)  # type: ignore[attr-defined]
    while True:
        model = [Counter[tuple[int, int]](), Counter[tuple[int, int]]()]
        for cells, writes in under_way:
            model[writes].update((layer, block) for layer in range(*cells.layers) for block in cells.blocks)
        assert ledger.check() == ()
        assert ledger.num_in_flight == sum(count.total() for count in model)
        for layer in range(NUM_LAYERS):
            one = Cells((layer, layer + 1), range(1, NUM_BLOCKS + 5))
            written = sorted({block for at, block in model[1] if at == layer})
            touched = sorted({block for count in model for at, block in count if at == layer})
            assert ledger.conflicts(one) == touched and ledger.conflicts(one, with_reads=False) == written
            ledger.require_still(layer, touched[-1] + 1 if touched else 0)
            if touched:
                with pytest.raises(ValueError, match=f"layer {layer} is in flight"):
                    ledger.require_still(layer, touched[-1])
        for block in range(1, NUM_BLOCKS):
            if any(block == other for count in model for _, other in count):
                with pytest.raises(ValueError, match="in flight"):
                    ledger.move([block], "dp", "tp2")
            else:
                ledger.move([block], "dp", "tp2")
                ledger.move([block], "tp2", "dp")
        if not under_way:
            break
        cells, writes = under_way.pop()
        ledger.end_copy(cells, writes=writes)


def test_a_copy_cannot_end_twice() -> None:
    ledger, cells = CellLedger(NUM_BLOCKS, "dp"), Cells((0, 1), [3])
    ledger.begin_copy(cells, writes=True)
    with pytest.raises(ValueError, match="no copy reads"):
        ledger.end_copy(cells, writes=False)
    assert ledger.check() != (), "a programmer's mistake shows in the laws as well"
