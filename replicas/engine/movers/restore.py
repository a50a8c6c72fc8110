"""The second part of a restore: requests go on in `dp`, or in narrower pipelines, with their KV (KunServe 4.4). All
weights that their members need are here by then.

All members go through the same rounds. In round k every member sends, of the k-th layer that it kept, each request's KV
to the member that has the layer in the request's new part. Then it frees all KV but that of its own part, which makes
room for what the others send.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from pengserve.planners.stages import Parts, stage_of
from pengserve.replicas.comm.communicator import Communicator
from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.engine.movers.reshard import Traveller
from pengserve.replicas.kv.channel import CommunicatorChannel
from pengserve.replicas.kv.host_tier import HostCells, HostTier
from pengserve.replicas.kv.standing import places
from pengserve.replicas.kv.tiered_rows import BlockPlace, on_device, rows_at
from pengserve.replicas.kv.transfer import Segment, Transfer, TransferPlan


class LayerRestore:
    """One member's part in one restore. Runs in the step thread; raises EngineError where a peer fails."""

    def __init__(
        self, lanes: Lanes, lane: PpLane, parts: Parts, communicator: Communicator, narrower: PpLane | None = None
    ) -> None:
        """`narrower`: the pipeline in which this member goes on; None: alone."""
        assert lanes.dp.memory is not None and lanes.tier is not None
        self._transfers, self._lane, self._parts = lanes.transfers, lane, parts
        self._channel = CommunicatorChannel(communicator, lane.rank)
        self._layers, self._tier = lanes.dp.memory.layers, lanes.tier
        self._tiers = lanes.dp.tiers if narrower is None else None
        self._narrower = narrower.tiers if narrower is not None else None
        self._rank, size = lane.rank, lane.num_stages
        self._ranges = [range(*lane.stages[stage_of(rank, size)]) for rank in range(size)]
        self._part, self._goal = parts.of(lane.rank), range(*parts.layers(lane.rank))
        self._num_blocks = self._layers.sizes.num_blocks(parts.layers(lane.rank))  # of each layer, where it goes on
        self._transfer: Transfer | None = None
        self.sent_bytes = 0

    @torch.inference_mode()
    def run(self, wave: Sequence[Traveller]) -> None:
        """Moves the KV of `wave` from the pipeline's blocks to `part_ids`, which are physical there.

        A traveller's rank is that of the leader of the part that it goes to. With a host tier, all of it stands still.
        """
        by_part: list[list[Traveller]] = [[] for _ in self._parts.sizes]
        for traveller in wave:
            by_part[self._parts.of(traveller.rank)].append(traveller)
        plan = TransferPlan(
            lane=self._lane.name,
            what="KV",
            rank=self._rank,
            outgoing=self._outgoing([self._sources(travellers) for travellers in by_part]),
            incoming=self._incoming(self._places(by_part[self._part])),
            on_sent=self._resize,
        )
        self._transfer = self._transfers.submit(plan, self._channel)
        self._transfers.run(self._transfer)
        for layer in self._goal:
            self._layers.resize_kv(layer, self._num_blocks)
        self._transfer.settle()
        if self._narrower is not None:
            self._narrower.grow(self._num_blocks)
        self.sent_bytes += plan.sent_bytes

    def _outgoing(self, source: Sequence[Sequence[BlockPlace]]) -> list[Segment]:
        """By layer that this member kept: KV for its own part, and for each other part's member that has the layer."""
        ranks = [rank for rank in range(len(self._ranges)) if self._parts.of(rank) != self._part]
        host = self._lane.tiers.host if self._lane.tiers is not None else None
        return [
            Segment(
                rank,
                layer,
                rows_at(self._tier, host, layer, source[self._parts.of(rank)]),
                round=number,
            )
            for number, layer in enumerate(self._ranges[self._rank])
            for rank in (self._rank, *ranks)
            if layer in range(*self._parts.layers(rank))
        ]

    def _places(self, travellers: Sequence[Traveller]) -> list[BlockPlace]:
        """Where the blocks of these are to be, in order: with a host tier, some of them on the host."""
        blocks = np.array([b for t in travellers for b in t.part_ids[: self._count(t)]], dtype=np.int64)
        if self._tiers is not None:
            self._tiers.claim(np.unique(blocks))
            found = places(self._tiers, np.unique(blocks))
            return [found[block] for block in blocks.tolist()]
        if self._narrower is not None:
            return self._narrower.hold(blocks, _columns(blocks, self._num_blocks))
        return on_device(blocks.tolist())

    def _incoming(self, targets: Sequence[BlockPlace]) -> list[Segment]:
        """By layer that this member has in its part: KV of the part's requests, from the rank that kept it."""
        host: HostCells | None = self._narrower.host if self._narrower is not None else None
        if self._tiers is not None:
            assert isinstance(self._tiers.host, HostTier)
            host = self._tiers.host
        return [
            Segment(rank, layer, rows_at(self._tier, host, layer, targets), round=number)
            for rank, layers in enumerate(self._ranges)
            for number, layer in enumerate(layers)
            if layer in self._goal
        ]

    def _resize(self, layer: int) -> None:
        """A kept layer has been sent: what its KV does not need from now on goes to layers whose KV waits."""
        assert self._transfer is not None
        self._layers.resize_kv(layer, self._num_blocks)
        for waiting in self._transfer.waiting_layers():
            if self._layers.room(waiting, self._num_blocks):
                self._layers.resize_kv(waiting, self._num_blocks)
        self._transfer.settle()

    def _count(self, traveller: Traveller) -> int:
        """Blocks that hold KV of this request."""
        return self._lane.blocks_for(traveller.num_tokens)

    def _sources(self, travellers: Iterable[Traveller]) -> list[BlockPlace]:
        """Where the blocks of these requests are on this member, in order."""
        table = self._lane.table
        blocks = [b for t in travellers for b in table.physical(t.logical_ids[: self._count(t)])]
        if self._lane.tiers is None:
            return on_device(blocks)
        found = places(self._lane.tiers.kv, np.unique(np.array(blocks, dtype=np.int64)))
        return [found[block] for block in blocks]


def _columns(blocks: np.ndarray, num_columns: int) -> np.ndarray:
    """Indices of the device for these blocks, each its own where it has one; 0 for those that are left."""
    found = np.where(blocks < num_columns, blocks, 0)
    free = np.setdiff1d(np.arange(1, num_columns), found)
    others = np.flatnonzero(found == 0)[: len(free)]
    found[others] = free[: len(others)]
    return found
