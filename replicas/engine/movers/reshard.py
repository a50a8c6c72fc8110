"""Moves running requests between the lanes of parts and the tp lane of the group: their KV is re-sharded by head.

A part is an instance alone, or on a merge a narrower tp group. A wave is a list of requests whose KV moves at once.
Every member goes through the same wave in the same order; of each request it sends what others need, keeps what it
needs itself, and receives the rest. On a merge all of that is in buffers before any of it is written, so that the lane
can have the very blocks that the wave came from.

    merge   the members of a part have all heads together -> member r gets the heads of rank r
    split   member r has heads of rank r                  -> the target gets all

Who sends what to whom is `kv_shares.flows_between`, as of migrations.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from pengserve.planners.types.layout import Group
from pengserve.replicas.comm.communicator import Communicator
from pengserve.replicas.engine.groups.tp_lane import TpLane
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.engine.lanes.handoff import Handoff, revive
from pengserve.replicas.engine.lanes.kv_shares import KvShare, flows_between, shares_of
from pengserve.replicas.engine.lanes.lane import Lane
from pengserve.replicas.kv.channel import CommunicatorChannel
from pengserve.replicas.kv.rows import TileRows
from pengserve.replicas.kv.transfer import Segment, Transfer, TransferPlan

ALL_LAYERS = 0  # a tile has KV of all layers: of two members one segment goes each way


class Traveller(msgspec.Struct, array_like=True):
    """One request of a wave."""

    request_id: str
    rank: int  # merge: of who leads the part that has it; split: of the member that gets it
    logical_ids: list[int]  # blocks of the group's lane, on a merge for what is to come, on a split for what is there
    handoff: Handoff
    part_ids: list[int] = []  # blocks of the narrower group, or of `dp` after a restore, that it comes from or goes to
    num_own: int = 0  # merge, from `dp`: blocks there that are free once it has gone,
    shared: list[int] = []  # and those that are free once all that travel and name them have gone
    is_parked: bool = False  # by an order: it stays so where it comes

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV moves."""
        return self.handoff.num_computed_tokens


class _Coming(NamedTuple):
    """Tiles of some requests, which one member has sent."""

    rows: TileRows
    share: KvShare
    group: Sequence[Traveller]


class Collected(NamedTuple):
    """KV of a wave that is here and not written yet."""

    transfer: Transfer
    coming: Sequence[_Coming]


class Resharder:
    """One member's part in the waves of one switch. Runs in the step thread; raises EngineError where a peer fails."""

    def __init__(
        self, lanes: Lanes, lane: TpLane, part: Lane, parts: Sequence[Group], communicator: Communicator
    ) -> None:
        """
        Args:
            lane: of the group that begins or ends.
            part: the lane that this member runs, or will, in its part.
            parts: that the group is formed of, or ends in, in rank order.
        """
        self._lanes, self._lane, self._part = lanes, lane, part
        self._rank, self._channel = lane.rank, CommunicatorChannel(communicator, lane.rank)
        view = self._dp_view = lanes.dp_view()
        self._size = view.layout.num_tokens  # of a tile
        self._lane_kv, self._part_kv = lane.kv(view), part.kv(view)
        self._shares = shares_of(lane.shape, view.num_layers, view.layout.num_heads)
        self._shares_of_part: dict[int, Sequence[KvShare]] = {}  # by the rank of who leads it
        first = 0
        for group in parts:
            self._shares_of_part[first] = shares_of(group.shape, view.num_layers, view.layout.num_heads)
            first += group.degree
        self.sent_bytes = 0

    def collect(self, wave: Sequence[Traveller]) -> Collected:
        """Merge: KV of the wave for this member's heads, from who has them; nothing has changed where it came from.

        The parts may release their requests afterwards, and `place` what this returns.
        """
        outgoing, incoming, coming = [], [], []
        for leader, group in _by_rank(wave).items():
            for flow in flows_between(self._shares_of_part[leader], self._shares):
                if leader + flow.source == self._rank:
                    rows = self._part_kv.bind(self._rows(flow.share, group), self._in_part(group), flow.share)
                    outgoing.append(Segment(flow.target, ALL_LAYERS, rows))
                if flow.target == self._rank:
                    rows = self._rows(flow.share, group)
                    incoming.append(Segment(leader + flow.source, ALL_LAYERS, rows))
                    coming.append(_Coming(rows, flow.share, group))
        return Collected(self._exchange(outgoing, incoming), coming)

    def place(self, wave: Sequence[Traveller], collected: Collected) -> None:
        """Merge: writes what `collect` returned into the lane's blocks. The member's runner knows the wave then."""
        for rows, share, group in collected.coming:
            self._lane_kv.bind(rows, _in_lane(group), share)
        collected.transfer.settle()
        for traveller in wave:
            self._lane.adopt(revive(traveller.handoff, 0))

    def split(self, wave: Sequence[Traveller], admit: Callable[[Traveller], list[int] | None]) -> list[str]:
        """tp -> `dp`. `admit` takes a request into this member's `dp` lane and gives its blocks there.

        Returns the ids of requests that this member was to take and had no room for; their KV is dropped.
        """
        outgoing, incoming, groups = [], [], _by_rank(wave)
        mine = groups.get(self._rank, [])
        targets = [admit(traveller) for traveller in mine]
        for target, group in groups.items():
            for flow in flows_between(self._shares, self._shares_of_part[target]):
                if flow.source == self._rank:
                    rows = self._lane_kv.bind(self._rows(flow.share, group), _in_lane(group), flow.share)
                    outgoing.append(Segment(target, ALL_LAYERS, rows))
                if target == self._rank:
                    rows = self._rows(flow.share, mine)
                    self._bind_found(rows, flow.share, mine, targets)
                    incoming.append(Segment(flow.source, ALL_LAYERS, rows))
        self._exchange(outgoing, incoming)
        return [t.request_id for t, target in zip(mine, targets, strict=True) if target is None]

    def _bind_found(
        self, rows: TileRows, share: KvShare, mine: Sequence[Traveller], targets: Sequence[list[int] | None]
    ) -> None:
        """What comes goes into the blocks of `targets`; that of requests that have none is dropped."""
        wanted: list[int] = []  # tiles of those that found room
        first = 0
        for traveller, target in zip(mine, targets, strict=True):
            count = _num_tiles([traveller], self._size)
            if target is not None:
                wanted += range(first, first + count)
            first += count
        found = [(target, t.num_tokens) for t, target in zip(mine, targets, strict=True) if target is not None]
        self._part_kv.bind(rows, found, share, wanted if len(wanted) < first else None)

    def _in_part(self, group: Sequence[Traveller]) -> list[tuple[list[int], int]]:
        """Where these requests' KV is before a merge, by blocks of the part's lane."""
        return [(t.part_ids or self._part.block_ids(t.request_id), t.num_tokens) for t in group]

    def _rows(self, share: KvShare, group: Sequence[Traveller]) -> TileRows:
        first, stop = share.heads
        return TileRows(self._dp_view, stop - first, _num_tiles(group, self._size), self._size)

    def _exchange(self, outgoing: Sequence[Segment], incoming: Sequence[Segment]) -> Transfer:
        plan = TransferPlan(lane=self._lane.name, what="KV", rank=self._rank, outgoing=outgoing, incoming=incoming)
        transfer = self._lanes.transfers.submit(plan, self._channel)
        self._lanes.transfers.run(transfer)
        self.sent_bytes += plan.sent_bytes
        return transfer


def _in_lane(group: Sequence[Traveller]) -> list[tuple[list[int], int]]:
    """Where these requests' KV is, or will be, by blocks of the group's lane."""
    return [(t.logical_ids, t.num_tokens) for t in group]


def _by_rank(wave: Sequence[Traveller]) -> dict[int, list[Traveller]]:
    """Travellers by their rank, in the order of the wave: what moves between two members is one move."""
    groups: dict[int, list[Traveller]] = {}
    for traveller in wave:
        groups.setdefault(traveller.rank, []).append(traveller)
    return groups


def _num_tiles(group: Sequence[Traveller], size: int) -> int:
    """Tiles of `size` tokens that these requests fill, their last ones perhaps in part."""
    return sum(-(-traveller.num_tokens // size) for traveller in group)
