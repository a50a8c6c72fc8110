"""A drop: memory changes hands at once, and the KV of running requests follows while new ones run (KunServe 4.2).

    begin     weights of dropped layers are freed and become tails of the layers that stay: new requests can run
    start     KV goes to the member that keeps its layer, a layer after the other (`replicas/kv/transfers.py`); when a
              layer has been sent, its memory becomes tails too
    done      everything that comes has come, and all blocks have memory: the requests can go on

The members come from instances alone, which have all layers, or from narrower pipelines, whose layers are split on:
what one member lacks of a request, another one of the request's own part has (`planners/stages.py`).

KV that a request has in layers its member keeps stays in place: the member's table names the same blocks. KV that is on
the member's host is sent from there, and copied from there into the layers that the member keeps, or to rows of these.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch

from pengserve.planners.stages import Parts, stage_of
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.engine.lanes.handoff import revive
from pengserve.replicas.engine.movers.reshard import Traveller
from pengserve.replicas.kv.channel import Channel
from pengserve.replicas.kv.host_tier import HostCells, HostTier
from pengserve.replicas.kv.ledger import Cells
from pengserve.replicas.kv.standing import stand_still
from pengserve.replicas.kv.tiered_rows import BlockPlace, on_device, rows_at
from pengserve.replicas.kv.transfer import Segment, Transfer, TransferPlan


class DropExchange:
    """One member's part in one drop. Belongs to the step thread."""

    def __init__(self, lanes: Lanes, lane: PpLane, parts: Parts) -> None:
        assert lanes.dp.memory is not None and lanes.tier is not None
        self._lanes, self._lane, self._parts = lanes, lane, parts
        self._part, self._held = parts.of(lane.rank), range(*parts.layers(lane.rank))
        self._memory, self._layers, self._tier = lanes.dp.memory, lanes.dp.memory.layers, lanes.tier
        self._kept = range(*lane.layers)
        self._goal = self._layers.sizes.num_blocks(lane.layers)
        self._ranges = [lane.stages[stage_of(rank, lane.num_stages)] for rank in range(lane.num_stages)]
        self._copies: list[tuple[BlockPlace, BlockPlace]] = []  # (place, where the content is that it needs)
        self._places: dict[int, BlockPlace] = {}  # with a host tier: of blocks of this member that have KV, or get some
        self._host: HostCells | None = None  # where KV comes from that is not on the device
        self._plan: TransferPlan | None = None
        self._transfer: Transfer | None = None
        self._on_done: Callable[[], None] = lambda: None

    # Begin ------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, wave: Sequence[Traveller], order: Sequence[int]) -> tuple[int, int]:
        """The parts' lanes -> this one, as far as it needs no KV.

        Args:
            wave: requests that go on in the lane once their KV is there, of the ranks that led their parts.
            order: the lane's other blocks, in the order in which they should get memory.

        Returns:
            How many of `order` have room now, and how many blocks of the device that is.
        """
        mine = [t for t in wave if self._parts.of(t.rank) == self._part]
        self._place(wave, order, self._before(mine))
        by_part = [
            self._physical(t for t in wave if self._parts.of(t.rank) == i) for i in range(len(self._parts.sizes))
        ]
        self._plan = TransferPlan(
            lane=self._lane.name,
            what="KV",
            rank=self._lane.rank,
            outgoing=self._outgoing(by_part[self._part]),
            incoming=self._incoming(by_part),
            on_sent=self._sent,
            on_done=self._done,
        )
        sent = {segment.layer for segment in self._plan.outgoing}
        for layer in self._held:
            if layer not in self._kept:
                self._memory.drop_weights(layer)
                if layer not in sent:
                    self._layers.resize_kv(layer, 0)
        self._grow()
        for traveller in wave:
            self._lane.adopt(revive(traveller.handoff, 0))
        return self._num_backed(order)

    def _num_backed(self, order: Sequence[int]) -> tuple[int, int]:
        here, tiers = self._layers.num_blocks(self._kept[0]), self._lane.tiers
        num_here = sum(block_id < here for block_id in self._lane.table.physical(order))
        if tiers is None:
            return num_here, num_here
        reserved = tiers.sizes.reserved_blocks  # with fewer blocks of the device, not every step would fit
        room = max(0, tiers.rows.num_free - reserved) if num_here >= reserved else 0
        return min(len(order), num_here + room), num_here

    def _outgoing(self, source: Sequence[BlockPlace]) -> list[Segment]:
        """Each layer that this member gives up goes to the rank that keeps it; then copies within this member."""
        copies = [origin for _, origin in self._copies]
        segments = [
            Segment(rank, layer, rows_at(self._tier, self._host, layer, source), round=layer - layers[0])
            for rank, layers in enumerate(self._ranges)
            if rank != self._lane.rank and source
            for layer in range(*layers)
            if layer in self._held
        ]
        last = self._layers.sizes.num_layers
        return segments + [
            Segment(self._lane.rank, layer, rows_at(self._tier, self._host, layer, copies), round=last)
            for layer in self._kept
            if copies
        ]

    def _incoming(self, by_part: Sequence[Sequence[BlockPlace]]) -> list[Segment]:
        """Each layer that this member keeps comes from the rank of each other part that had it there."""
        host = self._lane.tiers.host if self._lane.tiers is not None else None
        copies = [target for target, _ in self._copies]
        targets = {self._lane.rank: copies} | {
            rank: by_part[self._parts.of(rank)]
            for rank in range(self._lane.num_stages)
            if self._parts.of(rank) != self._part
        }
        return [
            Segment(rank, layer, rows_at(self._tier, host, layer, places))
            for rank, places in targets.items()
            for layer in self._kept
            if layer in range(*self._parts.layers(rank))
        ]

    def _place(self, wave: Sequence[Traveller], order: Sequence[int], before: Mapping[str, list[BlockPlace]]) -> None:
        """Backs all logical blocks of the lane.

        Own requests keep their physical blocks. A block that two of them share becomes two: the lane's scheduler does
        not know that it is shared. What is on the host becomes a block too, and is copied. Of the other physical
        blocks, `order` gets the lowest; KV that comes later gets the highest. What finds none goes to the host.

        Args:
            before: where the blocks of own requests are now.
        """
        table = self._lane.table
        used: set[int] = set()
        origins: dict[int, BlockPlace] = {}  # by logical block, of those that are copied within this member
        coming: list[int] = []
        others: list[int] = []  # that hold nothing yet
        for traveller in wave:
            count = self._count(traveller)
            others += traveller.logical_ids[count:]
            if self._parts.of(traveller.rank) != self._part:
                coming += traveller.logical_ids[:count]
                continue
            for logical, place in zip(traveller.logical_ids[:count], before[traveller.request_id], strict=True):
                if place.is_on_host or place.block in used:
                    origins[logical] = place
                else:
                    used.add(place.block)
                    table.lease([logical], [place.block])
        coming = [*origins, *coming]
        free = [block_id for block_id in range(1, self._goal) if block_id not in used]
        num_low = max(0, len(free) - len(coming))
        highest = free[num_low:]
        left = iter((*free[:num_low], *range(self._goal, self._num_ids)))
        table.lease(coming[: len(highest)], highest)
        for wanted in (order, others, coming[len(highest) :]):
            table.lease(wanted, [next(left) for _ in wanted])
        self._hold(sorted(used), table.physical(coming))
        self._copies = [(self._at(logical), origin) for logical, origin in origins.items()]

    @property
    def _num_ids(self) -> int:
        tiers = self._lane.tiers
        return tiers.kv.placement.num_blocks if tiers is not None else self._goal

    def _hold(self, here: Sequence[int], coming: Sequence[int]) -> None:
        """With a host tier, what is here has its places, and what comes gets some."""
        tiers = self._lane.tiers
        if tiers is not None:
            blocks = np.array([*here, *coming], dtype=np.int64)
            places = tiers.hold(blocks, np.where(blocks < self._goal, blocks, 0))
            self._places = dict(zip(blocks.tolist(), places, strict=True))

    def _at(self, logical: int) -> BlockPlace:
        """Where a block of the lane is to be on this member."""
        block = self._lane.table.physical([logical])[0]
        return self._places.get(block, BlockPlace(block))

    def _before(self, mine: Sequence[Traveller]) -> dict[str, list[BlockPlace]]:
        """Where the KV of this part's requests is, in the lane that ran until now."""
        dp, running = self._lanes.dp, self._lanes.running
        if running is None:
            ids = {t.request_id: dp.block_ids(t.request_id)[: self._count(t)] for t in mine}
            tiers = dp.tiers
        else:
            assert isinstance(running, PpLane)
            ids = {t.request_id: running.table.physical(t.part_ids[: self._count(t)]) for t in mine}
            tiers = running.tiers.kv if running.tiers is not None else None
        if tiers is None:
            return {request_id: on_device(blocks) for request_id, blocks in ids.items()}
        found = stand_still(tiers, np.array([b for blocks in ids.values() for b in blocks], dtype=np.int64))
        if isinstance(running, PpLane) and running.tiers is not None:
            assert self._lane.tiers is not None
            self._host = self._lane.tiers.take_over(running.tiers)
        else:
            assert dp.tiers is not None and isinstance(dp.tiers.host, HostTier)
            self._host = dp.tiers.host
        return {request_id: [found[block] for block in blocks] for request_id, blocks in ids.items()}

    # While it goes on -------------------------------------------------------------------------------------------------

    def start(self, channel: Channel, on_done: Callable[[], None]) -> None:
        """KV follows from now on, beside the steps; `on_done` is called when this member has all of it."""
        assert self._plan is not None
        self._on_done = on_done
        self._transfer = self._lanes.transfers.submit(self._plan, channel)

    def receive(self, owner: int, parts: Sequence[Buffer | torch.Tensor]) -> None:
        """Takes a piece of another member's.

        Raises:
            EngineError: it is none of this exchange.
        """
        assert self._transfer is not None
        self._transfer.receive(owner, parts)

    def _done(self) -> None:
        """All has come and gone: what was on the host before is not needed any more."""
        if (tiers := self._lanes.dp.tiers) is not None:
            tiers.forget_all()
        if self._lane.tiers is not None:
            self._lane.tiers.all_came()
        self._on_done()

    def _sent(self, layer: int) -> None:
        if layer not in self._kept:
            self._tier.release(Cells((layer, layer + 1), range(self._layers.num_blocks(layer))))
            self._grow()

    def _grow(self) -> None:
        """Free chunks become tails of the layers that stay, evenly."""
        sizes = self._layers.sizes
        have = sum(sizes.kv_chunks(self._layers.num_blocks(layer)) for layer in self._kept)
        have += self._layers.num_free_chunks
        blocks = min(self._goal, have // len(self._kept) * sizes.chunk_bytes // sizes.block_bytes)
        self._tier.reserve(Cells(self._lane.layers, range(blocks)))
        if self._lane.tiers is not None:
            self._lane.tiers.grow(blocks)
        if self._transfer is not None:
            self._transfer.settle()

    @property
    def total_bytes(self) -> int:
        """That this member sends."""
        return self._plan.sent_bytes if self._plan is not None else 0

    def _count(self, traveller: Traveller) -> int:
        """Blocks that hold KV of this request."""
        return self._lane.blocks_for(traveller.num_tokens)

    def _physical(self, travellers: Iterable[Traveller]) -> list[BlockPlace]:
        """Where the KV of these requests is, or is to be, on this member; of own ones, where it is read."""
        found: list[BlockPlace] = []
        for traveller in travellers:
            found += map(self._at, traveller.logical_ids[: self._count(traveller)])
        origins = dict(self._copies)
        return [origins.get(place, place) for place in found]
