"""Moves running requests between a member's `dp` lane and the group's tp lane: their KV is re-sharded by head.

A wave is a list of requests whose KV moves at once. Every member goes through the same wave in the same order; of each
request it sends what others need, keeps what it needs itself, and receives the rest. On a merge all of that is in
buffers before any of it is written, so that the lane can have the very blocks that the wave came from.

    merge   the owner has all heads      -> member r gets the heads of rank r
    split   member r has heads of rank r -> the target gets all (of replicated heads, from the first rank that has them)
"""

from collections.abc import Callable, Sequence

import msgspec
import torch

from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.comm.communicator import Communicator, Move
from pengserve.replicas.engine.handoff import Handoff, revive
from pengserve.replicas.engine.lanes import Lanes
from pengserve.replicas.engine.tp_lane import TpLane
from pengserve.replicas.memory.kv_views import KvView
from pengserve.replicas.memory.weight_views import Shard


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
        self._dp_view: KvView = lanes.dp_view()
        num_heads = self._dp_view.layout.num_heads
        self._heads = [Shard(rank, degree).heads(num_heads) for rank in range(degree)]
        self._primaries = [rank for rank in range(degree) if self._heads.index(self._heads[rank]) == rank]
        self.sent_bytes = 0

    @property
    def leader(self) -> InstanceKey:
        """Of the group."""
        return self._communicator.members[0]

    @torch.inference_mode()
    def collect(self, wave: Sequence[Traveller]) -> list[torch.Tensor]:
        """Merge: KV of the wave for this member's heads, from each owner; nothing has changed where it came from.

        Owners may release their requests afterwards, and `place` what this returns.
        """
        dp, dp_view = self._lanes.dp, self._dp_view
        own, size = self._heads[self._rank], dp_view.layout.num_tokens
        moves, collected = [], []
        for owner, group in _by_rank(wave).items():
            if owner == self._rank:
                source = dp_view.tiles([(dp.block_ids(t.request_id), t.num_tokens) for t in group], size)
                collected.append(dp_view.read(source, own))
                for rank, heads in enumerate(self._heads):
                    if rank != owner:
                        moves.append(Move(owner, rank, dp_view.read(source, heads)))
            else:
                data = dp_view.empty(own[1] - own[0], _num_tiles(group, size), size)
                moves.append(Move(owner, self._rank, data))
                collected.append(data)
        self._exchange(moves)
        return collected

    @torch.inference_mode()
    def place(self, wave: Sequence[Traveller], collected: Sequence[torch.Tensor]) -> None:
        """Merge: writes what `collect` returned into the lane's blocks. The member's runner knows the wave then."""
        own, size, tp_view = self._heads[self._rank], self._dp_view.layout.num_tokens, self._lane.kv_view
        for group, data in zip(_by_rank(wave).values(), collected, strict=True):
            tp_view.write(tp_view.tiles(self._in_lane(group), size), data, (0, own[1] - own[0]))
        for traveller in wave:
            self._lane.adopt(revive(traveller.handoff, 0))

    @torch.inference_mode()
    def split(self, wave: Sequence[Traveller], admit: Callable[[Traveller], list[int] | None]) -> list[str]:
        """tp -> `dp`. `admit` takes a request into this member's `dp` lane and gives its blocks there.

        Returns the ids of requests that this member was to take and had no room for; their KV is dropped.
        """
        dp_view, tp_view = self._dp_view, self._lane.kv_view
        own, size = self._heads[self._rank], dp_view.layout.num_tokens
        moves, received = [], []
        groups = _by_rank(wave)
        targets = [admit(traveller) for traveller in groups.get(self._rank, [])]
        for target, group in groups.items():
            if self._rank in self._primaries:
                data = tp_view.read(tp_view.tiles(self._in_lane(group), size), (0, own[1] - own[0]))
                if target == self._rank:
                    received.append((own, data))
                else:
                    moves.append(Move(self._rank, target, data))
            if target == self._rank:
                count = _num_tiles(group, size)
                for rank in self._primaries:
                    if rank != target:
                        data = dp_view.empty(self._heads[rank][1] - self._heads[rank][0], count, size)
                        moves.append(Move(rank, target, data))
                        received.append((self._heads[rank], data))
        self._exchange(moves)
        return self._take(groups.get(self._rank, []), targets, received)

    def _take(
        self,
        mine: Sequence[Traveller],
        targets: Sequence[list[int] | None],
        received: Sequence[tuple[tuple[int, int], torch.Tensor]],
    ) -> list[str]:
        """Writes what came into the blocks of `targets`; ids of the requests that have none."""
        size = self._dp_view.layout.num_tokens
        wanted: list[int] = []  # tiles of those that found room
        first = 0
        for traveller, target in zip(mine, targets, strict=True):
            count = -(-traveller.num_tokens // size)
            if target is not None:
                wanted += range(first, first + count)
            first += count
        pairs = [(target, t.num_tokens) for t, target in zip(mine, targets, strict=True) if target is not None]
        tiles = self._dp_view.tiles(pairs, size)
        for heads, data in received:
            self._dp_view.write(tiles, data if len(wanted) == first else data[:, :, wanted], heads)
        return [t.request_id for t, target in zip(mine, targets, strict=True) if target is None]

    def _in_lane(self, group: Sequence[Traveller]) -> list[tuple[list[int], int]]:
        """Where these requests' KV is, or will be, in the tp lane on this member."""
        return [(self._lane.table.physical(t.logical_ids), t.num_tokens) for t in group]

    def _exchange(self, moves: list[Move]) -> None:
        self.sent_bytes += sum(move.tensor.nbytes for move in moves if move.src == self._rank)
        if moves:
            self._communicator.exchange(moves)


def _by_rank(wave: Sequence[Traveller]) -> dict[int, list[Traveller]]:
    """Travellers by their rank, in the order of the wave: what moves between two members is one move."""
    groups: dict[int, list[Traveller]] = {}
    for traveller in wave:
        groups.setdefault(traveller.rank, []).append(traveller)
    return groups


def _num_tiles(group: Sequence[Traveller], size: int) -> int:
    """Tiles of `size` tokens that these requests fill, their last ones perhaps in part."""
    return sum(-(-traveller.num_tokens // size) for traveller in group)
