"""Blocks of the `dp` lane that other lanes have: all belong to `dp`, and the ledger knows who has which.

A tensor-parallel lane leases them as it needs them. A pipeline lane has them all, and those beyond them that dropped
parameters made room for.
"""

from collections.abc import Iterable, Sequence

from pengserve.replicas.engine.groups.group_lane import GroupLane
from pengserve.replicas.engine.groups.tp_lane import TpLane
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.kv.ledger import CellLedger


class Leases:
    """Belongs to the step thread."""

    def __init__(self, dp: DpLane) -> None:
        self._dp = dp
        self.ledger = CellLedger(dp.capacity.num_blocks + 1, "dp")

    def lease(self, lane: TpLane, logical_ids: Sequence[int]) -> None:
        """Backs logical blocks of `lane` with free ones of `dp`."""
        if logical_ids:
            physical_ids = self._dp.lend(len(logical_ids))
            lane.back(logical_ids, physical_ids)
            self.ledger.move(physical_ids, "dp", lane.name)

    def reclaim(self, lane: TpLane, logical_ids: Sequence[int]) -> None:
        """Gives the blocks behind `logical_ids` back to `dp`."""
        physical_ids = lane.table.release(logical_ids)
        self.ledger.move(physical_ids, lane.name, "dp")
        self._dp.take_back(physical_ids)

    def lend_all(self, lane: GroupLane) -> None:
        """All blocks of `dp` are the lane's; no request may hold any."""
        physical_ids = self._dp.lend(self._dp.capacity.num_blocks)
        self.ledger.move(physical_ids, "dp", lane.name)

    def return_all(self, lane: GroupLane) -> None:
        """All blocks that the lane has are `dp`'s again. The lane's own table stays as it is."""
        physical_ids = self.ledger.leased(lane.name)
        self.ledger.move(physical_ids, lane.name, "dp")
        self._dp.take_back(physical_ids)

    def check(self, lanes: Iterable[GroupLane], running: GroupLane | None) -> list[str]:
        """Conservation laws, as sentences where one is broken: every block has one owner, lent and leased agree."""
        wrong = list(self.ledger.check())
        leased = {lane.name: self.ledger.num_leased(lane.name) for lane in lanes}
        for lane in lanes:
            wrong += lane.check_table(leased[lane.name])
            if leased[lane.name] and lane is not running:
                wrong.append(f"{lane.name} keeps blocks while it does not run")
        num_lent = self._dp.capacity.num_blocks - self._dp.num_held
        if num_lent != sum(leased.values()):
            wrong.append(f"dp lent {num_lent} blocks, lanes have {leased}")
        return wrong
