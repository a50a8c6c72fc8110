"""Law: through all leases and returns, every block has one owner, and `dp`, tables and ledger agree."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")
from pengserve.replicas.engine.groups.leases import Leases
from pengserve.replicas.engine.groups.tp_lane import TpLane
from pengserve.replicas.kv.table import CellTable

NUM_BLOCKS = 12


class Blocks:
    """The `dp` lane's blocks, as far as they can be lent."""

    def __init__(self) -> None:
        self.capacity = SimpleNamespace(num_blocks=NUM_BLOCKS)
        self.free = list(range(1, NUM_BLOCKS + 1))

    @property
    def num_held(self) -> int:
        return len(self.free)  # no request has any

    def lend(self, count: int) -> list[int]:
        if count > len(self.free):
            raise ValueError("there are not so many")
        lent, self.free = self.free[:count], self.free[count:]
        return lent

    def take_back(self, block_ids: list[int]) -> None:
        self.free += block_ids


def make_lane(name: str = "tp2@(0,1)") -> Any:
    lane: Any = TpLane.__new__(TpLane)
    lane.group, lane.table = SimpleNamespace(unique_name=name), CellTable(NUM_BLOCKS + 1)
    return lane


def make() -> tuple[Leases, Blocks, Any]:
    dp: Any = Blocks()
    return Leases(dp), dp, make_lane()


@given(st.data())
def test_blocks_are_conserved(data: st.DataObject) -> None:
    leases, dp, lane = make()
    for _ in range(data.draw(st.integers(0, 8))):
        leased = lane.table.leased()
        if data.draw(st.booleans()):
            spare = [logical for logical in range(1, NUM_BLOCKS + 1) if logical not in leased]
            leases.lease(lane, spare[: data.draw(st.integers(0, len(spare)))])
        elif leased:
            leases.reclaim(lane, data.draw(st.lists(st.sampled_from(leased), unique=True)))
        assert leases.check([lane], lane) == []
        assert len(dp.free) + len(lane.table.leased()) == NUM_BLOCKS
        assert not set(dp.free) & set(lane.table.physical(lane.table.leased()))


def test_a_lane_that_has_all_blocks_gives_all_back() -> None:
    leases, dp, lane = make()
    leases.lend_all(lane)
    assert dp.free == [] and leases.ledger.num_leased(lane.name) == NUM_BLOCKS
    leases.return_all(lane)
    leases.return_all(lane)  # nothing is left to give back
    assert sorted(dp.free) == list(range(1, NUM_BLOCKS + 1))
    assert leases.check([lane], None) == []


def test_what_is_wrong_is_said_in_sentences() -> None:
    leases, dp, lane = make()
    leases.lease(lane, [1, 2])
    assert leases.check([lane], None) == ["tp2@(0,1) keeps blocks while it does not run"]
    lane.table.release([2])
    assert leases.check([lane], lane) == ["tp2@(0,1) has 1 blocks, the ledger says 2"]
    lane.table.lease([2], [2])
    dp.free.append(2)
    assert leases.check([lane], lane) == ["dp lent 1 blocks, lanes have {'tp2@(0,1)': 2}"]


def test_more_than_is_free_cannot_be_leased() -> None:
    leases, dp, lane = make()
    dp.free = dp.free[:1]
    with pytest.raises(ValueError, match="not so many"):
        leases.lease(lane, [1, 2])
    assert lane.table.leased() == [] and leases.ledger.check() == ()
