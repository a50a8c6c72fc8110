"""The second part of a restore: requests go back to `dp` with their KV (KunServe 4.4). All weights are here by then.

All members go through the same rounds. In round k every member sends, of the k-th layer that it kept, each request's KV
to the member that the request goes to. What it has beyond the blocks of `dp` is freed then, which makes room for what
the others send. What comes before there is memory for it waits in a buffer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from pengserve.planners.stages import stage_of
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.comm.communicator import Communicator, Move
from pengserve.replicas.engine.lanes import Lanes
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.reshard import Traveller


@dataclass(frozen=True, slots=True)
class _Rows:
    """KV of `layer` that comes, or waits for its place; those of its rows that are wanted go to `targets`."""

    layer: int
    data: torch.Tensor  # uint8 [n, bytes of a block in a layer]


class LayerRestore:
    """One member's part in one restore. Runs in the step thread; raises EngineError where a peer fails."""

    def __init__(self, lanes: Lanes, lane: PpLane, communicator: Communicator) -> None:
        assert lanes.dp.memory is not None
        self._lanes, self._lane, self._communicator = lanes, lane, communicator
        self._layers = lanes.dp.memory.layers
        self._rank, size = lane.rank, lane.num_stages
        self._ranges = [lane.stages[stage_of(rank, size)] for rank in range(size)]
        self._rows: list[int] = []  # of what comes for this member: those whose request found room
        self._targets: list[int] = []  # their blocks in `dp`
        self._waiting: list[_Rows] = []
        self.sent_bytes = 0

    @property
    def leader(self) -> InstanceKey:
        """Of the group."""
        return self._communicator.members[0]

    @torch.inference_mode()
    def run(self, wave: Sequence[Traveller], admit: Callable[[Traveller], list[int] | None]) -> list[str]:
        """pp -> `dp`. `admit` takes a request into this member's `dp` lane and gives its blocks there.

        Returns the ids of requests that this member was to take and had no room for; their KV is dropped.
        """
        source = {rank: self._physical(t for t in wave if t.rank == rank) for rank in range(len(self._ranges))}
        self._lane.table.release(self._lane.table.leased())
        self._lanes.return_all(self._lane)
        refused = self._make_room([t for t in wave if t.rank == self._rank], admit)
        for layers in self._rounds():
            self._round(layers, source)
        for layer in range(self._layers.sizes.num_layers):
            self._layers.resize_kv(layer, self._layers.base_blocks)
        self._settle()
        return refused

    def _make_room(self, mine: Sequence[Traveller], admit: Callable[[Traveller], list[int] | None]) -> list[str]:
        refused: list[str] = []
        row = 0
        for traveller in mine:
            block_ids, count = admit(traveller), self._count(traveller)
            if block_ids is None:
                refused.append(traveller.request_id)
            else:
                self._rows += range(row, row + count)
                self._targets += block_ids[:count]
            row += count
        return refused

    def _round(self, layers: Sequence[int | None], source: dict[int, list[int]]) -> None:
        moves: list[Move] = []
        mine = source[self._rank]
        for rank, layer in enumerate(layers):
            if layer is None:
                continue
            if rank == self._rank:
                kv = self._layers.kv(layer)
                moves += [Move(rank, other, kv[ids]) for other, ids in source.items() if other != rank and ids]
                self._waiting.append(_Rows(layer, kv[mine]))
            elif mine:
                shape = (len(mine), self._layers.sizes.block_bytes)
                rows = torch.empty(shape, dtype=torch.uint8, device=self._layers.kv(layer).device)
                moves.append(Move(rank, self._rank, rows))
                self._waiting.append(_Rows(layer, rows))
        self.sent_bytes += sum(move.tensor.nbytes for move in moves if move.src == self._rank)
        if moves:
            self._communicator.exchange(moves)
        own = layers[self._rank]
        if own is not None:
            self._layers.resize_kv(own, self._layers.base_blocks)
        self._settle()

    def _rounds(self) -> Iterator[list[int | None]]:
        """By round: the layer that each rank deals with, or None where it has no more."""
        for index in range(max(stop - first for first, stop in self._ranges)):
            yield [first + index if first + index < stop else None for first, stop in self._ranges]

    def _settle(self) -> None:
        """Puts KV that has come where it belongs, as far as there is memory."""
        base = self._layers.base_blocks
        still: list[_Rows] = []
        for rows in self._waiting:
            if self._layers.num_blocks(rows.layer) >= base or self._layers.room(rows.layer, base):
                self._layers.resize_kv(rows.layer, base)
                if self._targets:
                    self._layers.kv(rows.layer)[self._targets] = rows.data[self._rows]
            else:
                still.append(rows)
        self._waiting = still

    def _count(self, traveller: Traveller) -> int:
        """Blocks that hold KV of this request."""
        return self._lane.blocks_for(traveller.num_tokens)

    def _physical(self, travellers: Iterable[Traveller]) -> list[int]:
        """Blocks of these requests on this member, in order."""
        return [b for t in travellers for b in self._lane.table.physical(t.logical_ids[: self._count(t)])]
