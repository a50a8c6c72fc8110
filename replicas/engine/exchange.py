"""A drop: memory changes hands at once, and the KV of running requests follows while new ones run (KunServe 4.2).

    begin     weights of dropped layers are freed and become tails of the layers that stay: new requests can run
    advance   a piece of KV goes to the member that keeps its layer, a layer after the other; when a layer has been
              sent, its memory becomes tails too
    done      everything that comes has come, and all blocks have memory: the requests can go on

The members come from instances alone, which have all layers, or from narrower pipelines, whose layers are split on:
what one member lacks of a request, another one of the request's own part has (`planners/stages.py`).

KV that a request has in layers its member keeps stays in place: the member's table names the same blocks. What comes
before there is memory for it waits in a buffer.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from pengserve.planners.stages import Parts, stage_of
from pengserve.planners.types.errors import EngineError
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.handoff import revive
from pengserve.replicas.engine.lanes import Lanes
from pengserve.replicas.engine.pacing import Pace, SendPiece
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.reshard import Traveller


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """KV of one layer that one rank needs."""

    layer: int
    rank: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """KV that waits for its place: blocks `block_ids` of `layer`."""

    layer: int
    block_ids: list[int]
    data: torch.Tensor  # uint8 [n, bytes of a block in a layer]


class DropExchange:
    """One member's part in one drop. Belongs to the step thread."""

    def __init__(self, lanes: Lanes, lane: PpLane, parts: Parts) -> None:
        assert lanes.dp.memory is not None
        self._lanes, self._lane, self._parts = lanes, lane, parts
        self._part, self._held = parts.of(lane.rank), range(*parts.layers(lane.rank))
        self._memory, self._layers = lanes.dp.memory, lanes.dp.memory.layers
        self._first, self._stop = lane.layers
        self._goal = self._layers.sizes.num_blocks(lane.layers)
        self._ranges = [lane.stages[stage_of(rank, lane.num_stages)] for rank in range(lane.num_stages)]
        self._source: list[int] = []  # blocks of the requests of this member's part
        self._targets: dict[int, list[int]] = {}  # by another part: this member's blocks for KV of its requests
        self._copies: list[tuple[int, int]] = []  # (block, the one whose content it needs)
        self._outgoing: deque[_Outgoing] = deque()
        self._num_sent = 0  # rows of the first of these
        self._num_due = 0  # rows that have not come
        self._waiting: list[_Rows] = []
        self._piece = Pace()
        self._is_done = False
        self.total_bytes = 0  # that this member sends
        self.send: SendPiece = lambda rank, parts: None
        self.on_done: Callable[[], None] = lambda: None

    # Begin ------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, wave: Sequence[Traveller], order: Sequence[int]) -> int:
        """The parts' lanes -> this one, as far as it needs no KV.

        Args:
            wave: requests that go on in the lane once their KV is there, of the ranks that led their parts.
            order: the lane's other blocks, in the order in which they should get memory.

        Returns:
            How many of `order` have memory now.
        """
        self._place(wave, order)
        by_part = [
            self._physical(t for t in wave if self._parts.of(t.rank) == i) for i in range(len(self._parts.sizes))
        ]
        self._source = by_part[self._part]
        self._targets = {i: rows for i, rows in enumerate(by_part) if rows and i != self._part}
        self._num_due = (self._stop - self._first) * sum(map(len, self._targets.values()))
        for index in range(max(stop - first for first, stop in self._ranges)):
            for other, (first, stop) in enumerate(self._ranges):
                if other != self._lane.rank and first + index < stop and first + index in self._held:
                    self._leave(first + index, other)
        self.total_bytes = len(self._outgoing) * len(self._source) * self._layers.sizes.block_bytes
        self._grow()
        for traveller in wave:
            self._lane.adopt(revive(traveller.handoff, 0))
        here = self._layers.num_blocks(self._first)
        return sum(block_id < here for block_id in self._lane.table.physical(order))

    def _leave(self, layer: int, owner: int) -> None:
        """Gives up a layer that `owner`, a rank of another part, keeps: its weights now, its KV once it is sent."""
        self._memory.drop_weights(layer)
        if self._source:
            self._outgoing.append(_Outgoing(layer, owner))
        else:
            self._layers.resize_kv(layer, 0)

    def _place(self, wave: Sequence[Traveller], order: Sequence[int]) -> None:
        """Backs all logical blocks of the lane.

        Own requests keep their physical blocks. A block that two of them share becomes two: the lane's scheduler does
        not know that it is shared. Of the other physical blocks, `order` gets the lowest; KV that comes later gets the
        highest.
        """
        table = self._lane.table
        used: set[int] = set()
        shared: list[tuple[int, int]] = []
        later: list[int] = []
        for traveller in wave:
            logical_ids = list(traveller.logical_ids)
            if self._parts.of(traveller.rank) == self._part:
                count = self._count(traveller)
                in_place = zip(logical_ids[:count], self._before(traveller)[:count], strict=True)
                logical_ids = logical_ids[count:]
                for logical, physical in in_place:
                    if physical in used:
                        shared.append((logical, physical))
                    else:
                        used.add(physical)
                        table.lease([logical], [physical])
            later += logical_ids
        free = (block_id for block_id in range(1, self._goal) if block_id not in used)
        for wanted in (order, [logical for logical, _ in shared], later):
            table.lease(wanted, [next(free) for _ in wanted])
        self._copies = [(table.physical([logical])[0], origin) for logical, origin in shared]

    def _before(self, traveller: Traveller) -> list[int]:
        """Where the KV of a request of this part is, in the lane that ran until now."""
        if self._lanes.running is None:
            return self._lanes.dp.block_ids(traveller.request_id)
        return self._lanes.running.table.physical(traveller.part_ids)

    # Advance ----------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def advance(self, step_s: float) -> bool:
        """Sends one piece, of about the time that a step takes (`step_s`); True when there are no more to send.

        Raises:
            EngineError: the other member is gone.
        """
        if not self._outgoing:
            self._finish()
            return True
        going, started_s = self._outgoing[0], time.perf_counter()
        count = max(1, self._piece.num_bytes // self._layers.sizes.block_bytes)
        rows = self._source[self._num_sent : self._num_sent + count]
        data = self._layers.read_kv(going.layer, rows).cpu()
        header = b"%d %d" % (going.layer, self._num_sent)
        self.send(going.rank, [header, memoryview(data.view(-1).numpy())])
        self._piece.took(data.nbytes, time.perf_counter() - started_s, step_s)
        self._num_sent += len(rows)
        if self._num_sent == len(self._source):
            self._outgoing.popleft()
            self._num_sent = 0
            self._layers.resize_kv(going.layer, 0)
            self._grow()
        if not self._outgoing:
            self._finish()
            return True
        return False

    @torch.inference_mode()
    def receive(self, owner: int, parts: Sequence[Buffer]) -> None:
        """Takes a piece of another member's.

        Raises:
            EngineError: it is none of this exchange.
        """
        layer, first = map(int, bytes(parts[0]).split())
        data = torch.frombuffer(parts[1], dtype=torch.uint8).view(-1, self._layers.sizes.block_bytes)
        block_ids = self._targets.get(self._parts.of(owner), [])[first : first + len(data)]
        is_due = self._first <= layer < self._stop and layer in range(*self._parts.layers(owner))
        if len(block_ids) != len(data) or not is_due:
            raise EngineError(f"rank {owner} sent KV of layer {layer} that does not belong here")
        self._num_due -= len(block_ids)
        self._waiting.append(_Rows(layer, block_ids, data))
        self._settle()
        self._finish()

    def _grow(self) -> None:
        """Free chunks become tails of the layers that stay, evenly."""
        sizes, kept = self._layers.sizes, range(self._first, self._stop)
        have = sum(sizes.kv_chunks(self._layers.num_blocks(layer)) for layer in kept) + self._layers.num_free_chunks
        blocks = min(self._goal, have // len(kept) * sizes.chunk_bytes // sizes.block_bytes)
        for layer in kept:
            if blocks > self._layers.num_blocks(layer):
                self._layers.resize_kv(layer, blocks)
        self._settle()

    def _settle(self) -> None:
        """Writes what has come where there is memory for it."""
        still: list[_Rows] = []
        for rows in self._waiting:
            if max(rows.block_ids) < self._layers.num_blocks(rows.layer):
                self._layers.write_kv(rows.layer, rows.block_ids, rows.data)
            else:
                still.append(rows)
        self._waiting = still

    def _finish(self) -> None:
        if self._is_done or self._outgoing or self._num_due or self._waiting:
            return
        self._is_done = True
        if self._copies:
            targets, origins = map(list, zip(*self._copies, strict=True))
            for layer in range(self._first, self._stop):
                self._layers.copy_kv(layer, origins, targets)
        self.on_done()

    @property
    def is_done(self) -> bool:
        """Whether this member has sent and received everything, and has all its memory."""
        return self._is_done

    def _count(self, traveller: Traveller) -> int:
        """Blocks that hold KV of this request."""
        return self._lane.blocks_for(traveller.num_tokens)

    def _physical(self, travellers: Iterable[Traveller]) -> list[int]:
        """Where the KV of these requests is, or is to be, on this member; of own ones, where it is read."""
        physical = self._lane.table.physical
        ids = [b for t in travellers for b in physical(t.logical_ids[: self._count(t)])]
        origins = dict(self._copies)
        return [origins.get(block_id, block_id) for block_id in ids]
