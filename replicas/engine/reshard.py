"""Moves running requests between a member's `dp` lane and the group's tp lane: their KV is re-sharded by head.

A wave is a list of requests whose KV moves at once. Every member goes through the same wave in the same order; of each
request it sends what others need, keeps what it needs itself, and receives the rest.

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

MAX_WAVE_TOKENS = 1 << 15  # bounds the buffers of a wave


class Traveller(msgspec.Struct, array_like=True):
    """One request of a wave."""

    request_id: str
    rank: int  # merge: of the member that has it; split: of the member that gets it
    logical_ids: list[int]  # of the tp lane, on a merge for what is to come, on a split for what is there
    handoff: Handoff

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

    def merge(self, wave: Sequence[Traveller]) -> None:
        """`dp` -> tp. Owners may release their requests afterwards; members' runners know all of them."""
        moves, received = [], []
        tp_view, table, own = self._lane.kv_view, self._lane.table, self._heads[self._rank]
        for traveller in wave:
            size = traveller.num_tokens
            blocks = table.physical(traveller.logical_ids)
            if traveller.rank == self._rank:
                source = self._lanes.dp.block_ids(traveller.request_id)[: self._lanes.dp.blocks_for(size)]
                for rank, heads in enumerate(self._heads):
                    data = self._dp_view.read(source, size, heads)
                    if rank == self._rank:
                        received.append((blocks, data))
                    else:
                        moves.append(Move(self._rank, rank, data))
            else:
                data = tp_view.empty(own[1] - own[0], size)
                moves.append(Move(traveller.rank, self._rank, data))
                received.append((blocks, data))
        self._exchange(moves)
        for blocks, data in received:
            used = blocks[: self._lane.blocks_for(data.shape[3])]
            tp_view.write(used, data, (0, own[1] - own[0]))
        for traveller in wave:
            self._lane.adopt(revive(traveller.handoff, 0))

    def split(self, wave: Sequence[Traveller], admit: Callable[[Traveller], list[int] | None]) -> list[str]:
        """tp -> `dp`. `admit` takes a request into this member's `dp` lane and gives its blocks there.

        Returns the ids of requests that this member was to take and had no room for; their KV is dropped.
        """
        moves, received, refused = [], [], []
        tp_view, table = self._lane.kv_view, self._lane.table
        own = self._heads[self._rank]
        for traveller in wave:
            size = traveller.num_tokens
            target: list[int] | None = None
            if traveller.rank == self._rank:
                target = admit(traveller)
                if target is None:
                    refused.append(traveller.request_id)
            for rank in self._primaries:
                if rank == self._rank:
                    source = table.physical(traveller.logical_ids)[: self._lane.blocks_for(size)]
                    data = tp_view.read(source, size, (0, own[1] - own[0]))
                    if traveller.rank == rank:
                        received.append((target, data, own))
                    else:
                        moves.append(Move(rank, traveller.rank, data))
                elif traveller.rank == self._rank:
                    heads = self._heads[rank]
                    data = self._dp_view.empty(heads[1] - heads[0], size)
                    moves.append(Move(rank, self._rank, data))
                    received.append((target, data, heads))
        self._exchange(moves)
        for target, data, heads in received:
            if target is not None:
                self._dp_view.write(target[: self._lanes.dp.blocks_for(data.shape[3])], data, heads)
        return refused

    def _exchange(self, moves: list[Move]) -> None:
        self.sent_bytes += sum(move.tensor.nbytes for move in moves if move.src == self._rank)
        if moves:
            with torch.inference_mode():
                self._communicator.exchange(moves)
