"""The second part of a restore: requests go on in `dp`, or in narrower pipelines, with their KV (KunServe 4.4). All
weights that their members need are here by then.

All members go through the same rounds. In round k every member sends, of the k-th layer that it kept, each request's KV
to the member that has the layer in the request's new part. Then it frees all KV but that of its own part, which makes
room for what the others send. KV that comes before there is memory for it waits in a buffer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pengserve.planners.stages import Parts, stage_of
from pengserve.replicas.comm.communicator import Communicator, Move
from pengserve.replicas.engine.lanes import Lanes
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.reshard import Traveller


@dataclass(frozen=True, slots=True)
class _Rows:
    """KV of `layer` that comes, or waits for its place."""

    layer: int
    data: torch.Tensor  # uint8 [n, bytes of a block in a layer]


class LayerRestore:
    """One member's part in one restore. Runs in the step thread; raises EngineError where a peer fails."""

    def __init__(self, lanes: Lanes, lane: PpLane, parts: Parts, communicator: Communicator) -> None:
        assert lanes.dp.memory is not None
        self._lane, self._parts, self._communicator = lane, parts, communicator
        self._layers = lanes.dp.memory.layers
        self._rank, size = lane.rank, lane.num_stages
        self._ranges = [lane.stages[stage_of(rank, size)] for rank in range(size)]
        self._part, self._goal = parts.of(lane.rank), parts.layers(lane.rank)
        self._num_blocks = self._layers.sizes.num_blocks(self._goal)  # of each of its layers, where it goes on
        self._targets: list[int] = []  # blocks of this member's part for what comes
        self._waiting: list[_Rows] = []
        self.sent_bytes = 0

    @torch.inference_mode()
    def run(self, wave: Sequence[Traveller]) -> None:
        """Moves the KV of `wave` from the pipeline's blocks to `part_ids`, which are physical there.

        A traveller's rank is that of the leader of the part that it goes to.
        """
        by_part: list[list[Traveller]] = [[] for _ in self._parts.sizes]
        for traveller in wave:
            by_part[self._parts.of(traveller.rank)].append(traveller)
        source = [self._physical(travellers) for travellers in by_part]
        self._targets = [b for t in by_part[self._part] for b in t.part_ids[: self._count(t)]]
        for layers in self._rounds():
            self._round(layers, source)
        for layer in range(*self._goal):
            self._layers.resize_kv(layer, self._num_blocks)
        self._settle()

    def _round(self, layers: Sequence[int | None], source: Sequence[list[int]]) -> None:
        moves: list[Move] = []
        for rank, layer in enumerate(layers):
            if layer is None:
                continue
            if rank == self._rank:
                moves += self._send(layer, source)
                self._waiting.append(_Rows(layer, self._layers.read_kv(layer, source[self._part])))
            elif self._targets and layer in range(*self._goal):
                shape = (len(self._targets), self._layers.sizes.block_bytes)
                rows = torch.empty(shape, dtype=torch.uint8, device=self._layers.kv(layer).device)
                moves.append(Move(rank, self._rank, rows))
                self._waiting.append(_Rows(layer, rows))
        self.sent_bytes += sum(move.tensor.nbytes for move in moves if move.src == self._rank)
        if moves:
            self._communicator.exchange(moves)
        own = layers[self._rank]
        if own is not None:
            self._layers.resize_kv(own, self._num_blocks)
        self._settle()

    def _send(self, layer: int, source: Sequence[list[int]]) -> list[Move]:
        """Sends a layer's KV of the requests that go to other parts to the members that have the layer there."""
        return [
            Move(self._rank, rank, self._layers.read_kv(layer, source[self._parts.of(rank)]))
            for rank in range(len(self._ranges))
            if self._parts.of(rank) != self._part
            and source[self._parts.of(rank)]
            and layer in range(*self._parts.layers(rank))
        ]

    def _rounds(self) -> Iterator[list[int | None]]:
        """By round: the layer that each rank deals with, or None where it has no more."""
        for index in range(max(stop - first for first, stop in self._ranges)):
            yield [first + index if first + index < stop else None for first, stop in self._ranges]

    def _settle(self) -> None:
        """Puts KV that has come where it belongs, as far as there is memory."""
        goal = self._num_blocks
        still: list[_Rows] = []
        for rows in self._waiting:
            if self._layers.num_blocks(rows.layer) >= goal or self._layers.room(rows.layer, goal):
                self._layers.resize_kv(rows.layer, goal)
                if self._targets:
                    self._layers.write_kv(rows.layer, self._targets, rows.data)
            else:
                still.append(rows)
        self._waiting = still

    def _count(self, traveller: Traveller) -> int:
        """Blocks that hold KV of this request."""
        return self._lane.blocks_for(traveller.num_tokens)

    def _physical(self, travellers: Iterable[Traveller]) -> list[int]:
        """Blocks of these requests on this member, in order."""
        return [b for t in travellers for b in self._lane.table.physical(t.logical_ids[: self._count(t)])]
