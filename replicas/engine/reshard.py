"""Moves running requests between a member's `dp` lane and the group's tp lane: their KV is re-sharded by head.

A wave is a list of requests whose KV moves at once. Every member goes through the same wave in the same order; of each
request it sends what others need, keeps what it needs itself, and receives the rest. On a merge all of that is in
buffers before any of it is written, so that the lane can have the very blocks that the wave came from.

    merge   the owner has all heads      -> member r gets the heads of rank r
    split   member r has heads of rank r -> the target gets all (of replicated heads, from the first rank that has them)
"""

from collections.abc import Callable, Sequence

import msgspec

from pengserve.replicas.comm.communicator import Communicator
from pengserve.replicas.engine.handoff import Handoff, revive
from pengserve.replicas.engine.lanes import Lanes
from pengserve.replicas.engine.tp_lane import TpLane
from pengserve.replicas.kv.channel import CommunicatorChannel
from pengserve.replicas.kv.rows import TileRows
from pengserve.replicas.kv.transfer import Segment, Transfer, TransferPlan
from pengserve.replicas.memory.kv_views import KvView
from pengserve.replicas.memory.weight_views import Shard

ALL_LAYERS = 0  # a tile has KV of all layers: of two members one segment goes each way


class Traveller(msgspec.Struct, array_like=True):
    """One request of a wave."""

    request_id: str
    rank: int  # merge: of the member that has it; split: of the member that gets it
    logical_ids: list[int]  # blocks of the group's lane, on a merge for what is to come, on a split for what is there
    handoff: Handoff
    part_ids: list[int] = []  # blocks of the narrower pipeline, or of `dp`, that it comes from or goes to
    num_own: int = 0  # merge: blocks of `dp` that are free once it has gone,
    shared: list[int] = []  # and those that are free once all that travel and name them have gone

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV moves."""
        return self.handoff.num_computed_tokens


class Resharder:
    """One member's part in the waves of one switch. Runs in the step thread; raises EngineError where a peer fails."""

    def __init__(self, lanes: Lanes, lane: TpLane, communicator: Communicator) -> None:
        self._lanes, self._lane, self._communicator = lanes, lane, communicator
        self._rank, degree = lane.shard.rank, lane.shard.degree
        self._channel = CommunicatorChannel(communicator, self._rank)
        self._dp_view: KvView = lanes.dp_view()
        self._size = self._dp_view.layout.num_tokens  # of a tile
        num_heads = self._dp_view.layout.num_heads
        self._heads = [Shard(rank, degree).heads(num_heads) for rank in range(degree)]
        self._primaries = [rank for rank in range(degree) if self._heads.index(self._heads[rank]) == rank]
        self.sent_bytes = 0

    def collect(self, wave: Sequence[Traveller]) -> Transfer:
        """Merge: KV of the wave for this member's heads, from each owner; nothing has changed where it came from.

        Owners may release their requests afterwards, and `place` what this returns.
        """
        outgoing, incoming, groups = [], [], _by_rank(wave)
        if self._rank in groups:
            source = [(self._lanes.dp.block_ids(t.request_id), t.num_tokens) for t in groups[self._rank]]
            for rank, heads in enumerate(self._heads):
                rows = self._rows(heads, groups[self._rank]).bind(self._dp_view, source, heads)
                outgoing.append(Segment(rank, ALL_LAYERS, rows))
        for owner, group in groups.items():
            incoming.append(Segment(owner, ALL_LAYERS, self._rows(self._heads[self._rank], group)))
        return self._exchange(outgoing, incoming)

    def place(self, wave: Sequence[Traveller], collected: Transfer) -> None:
        """Merge: writes what `collect` returned into the lane's blocks. The member's runner knows the wave then."""
        first, stop = self._heads[self._rank]
        for segment, group in zip(collected.plan.incoming, _by_rank(wave).values(), strict=True):
            assert isinstance(segment.rows, TileRows)
            segment.rows.bind(self._lane.kv_view, self._in_lane(group), (0, stop - first))
        collected.settle()
        for traveller in wave:
            self._lane.adopt(revive(traveller.handoff, 0))

    def split(self, wave: Sequence[Traveller], admit: Callable[[Traveller], list[int] | None]) -> list[str]:
        """tp -> `dp`. `admit` takes a request into this member's `dp` lane and gives its blocks there.

        Returns the ids of requests that this member was to take and had no room for; their KV is dropped.
        """
        outgoing, incoming, groups = [], [], _by_rank(wave)
        mine = groups.get(self._rank, [])
        targets = [admit(traveller) for traveller in mine]
        if self._rank in self._primaries:
            first, stop = self._heads[self._rank]
            for target, group in groups.items():
                in_lane = self._in_lane(group)
                rows = self._rows((first, stop), group).bind(self._lane.kv_view, in_lane, (0, stop - first))
                outgoing.append(Segment(target, ALL_LAYERS, rows))
        for rank in self._primaries if mine else []:
            rows = self._rows(self._heads[rank], mine)
            self._bind_found(rows, self._heads[rank], mine, targets)
            incoming.append(Segment(rank, ALL_LAYERS, rows))
        self._exchange(outgoing, incoming)
        return [t.request_id for t, target in zip(mine, targets, strict=True) if target is None]

    def _bind_found(
        self,
        rows: TileRows,
        heads: tuple[int, int],
        mine: Sequence[Traveller],
        targets: Sequence[list[int] | None],
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
        rows.bind(self._dp_view, found, heads, wanted if len(wanted) < first else None)

    def _in_lane(self, group: Sequence[Traveller]) -> list[tuple[list[int], int]]:
        """Where these requests' KV is, or will be, in the tp lane on this member."""
        return [(self._lane.table.physical(t.logical_ids), t.num_tokens) for t in group]

    def _rows(self, heads: tuple[int, int], group: Sequence[Traveller]) -> TileRows:
        return TileRows(self._dp_view, heads[1] - heads[0], _num_tiles(group, self._size), self._size)

    def _exchange(self, outgoing: Sequence[Segment], incoming: Sequence[Segment]) -> Transfer:
        plan = TransferPlan(lane=self._lane.name, what="KV", rank=self._rank, outgoing=outgoing, incoming=incoming)
        transfer = self._lanes.transfers.submit(plan, self._channel)
        self._lanes.transfers.run(transfer)
        self.sent_bytes += plan.sent_bytes
        return transfer


def _by_rank(wave: Sequence[Traveller]) -> dict[int, list[Traveller]]:
    """Travellers by their rank, in the order of the wave: what moves between two members is one move."""
    groups: dict[int, list[Traveller]] = {}
    for traveller in wave:
        groups.setdefault(traveller.rank, []).append(traveller)
    return groups


def _num_tiles(group: Sequence[Traveller], size: int) -> int:
    """Tiles of `size` tokens that these requests fill, their last ones perhaps in part."""
    return sum(-(-traveller.num_tokens // size) for traveller in group)
