"""Real memory for tests of transfers: an arena, a ledger, and members that hear each other at random."""

import random
from collections.abc import Sequence
from typing import Any

import torch

from pengserve.planners.layer_sizes import LayerSizes
from pengserve.replicas.kv.channel import PeerChannel
from pengserve.replicas.kv.ledger import CellLedger
from pengserve.replicas.kv.rows import CellRows
from pengserve.replicas.kv.tiers import DeviceTier
from pengserve.replicas.kv.transfer import Segment, Transfer, TransferPlan
from pengserve.replicas.kv.transfers import Transfers
from pengserve.replicas.memory.arena.open import open_arena
from pengserve.replicas.memory.layers import LayerMemory

CHUNK, BLOCK, LAYERS = 64 << 10, 24 << 10, 3
SIZES = LayerSizes(num_chunks=60, chunk_bytes=CHUNK, weight_bytes=(100_000,) * LAYERS, block_bytes=BLOCK)
LANE = "pp2@(0,1)"


class Room:
    """One member."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.arena = open_arena(torch.device("cpu"), SIZES.num_chunks * CHUNK, CHUNK)
        self.memory = LayerMemory(self.arena, SIZES, fewest_layers=1)
        self.ledger = CellLedger(self.memory.base_blocks, "dp")
        self.tier = DeviceTier(self.memory, self.ledger)
        self.transfers = Transfers(self.ledger)
        self.transfer: Transfer | None = None
        self.inbox: list[tuple[int, list[bytearray]]] = []

    def fill(self, seed: int = 0) -> None:
        for layer in range(LAYERS):
            for block in range(self.memory.num_blocks(layer)):
                self.memory.kv(layer)[block].fill_(content(self.rank, layer, block, seed))

    def rows(self, layer: int, blocks: Sequence[int]) -> CellRows:
        return CellRows(self.tier, layer, blocks)

    def plan(
        self, outgoing: Sequence[Segment] = (), incoming: Sequence[Segment] = (), **callbacks: Any
    ) -> TransferPlan:
        return TransferPlan(lane=LANE, what="KV", rank=self.rank, outgoing=outgoing, incoming=incoming, **callbacks)

    def copy(self, layer: int, sources: Sequence[int], targets: Sequence[int]) -> tuple[list[Segment], list[Segment]]:
        """Segments of a copy within this member."""
        return [Segment(self.rank, layer, self.rows(layer, sources))], [
            Segment(self.rank, layer, self.rows(layer, targets))
        ]

    def bytes(self) -> list[torch.Tensor]:
        """A copy of all KV that is here, by layer."""
        return [self.memory.kv(layer)[: self.memory.num_blocks(layer)].clone() for layer in range(LAYERS)]

    def require_laws(self) -> None:
        assert self.ledger.check() == () and self.transfers.check() == () and self.memory.check_chunks() == ()

    def close(self) -> None:
        self.arena.close()


def content(rank: int, layer: int, block: int, seed: int = 0) -> int:
    return (rank * 101 + layer * 37 + block * 5 + seed * 13 + 1) % 251


def deliver_to(rooms: Sequence[Room], own: int) -> PeerChannel:
    """Messages of member `own` lie in the others' inboxes until they are heard."""
    return PeerChannel(lambda rank, parts: rooms[rank].inbox.append((own, [bytearray(bytes(p)) for p in parts])))


def hear_at_random(rooms: Sequence[Room], source: random.Random) -> None:
    """Members send, and hear what has come in any order, until there is nothing left of either."""
    while any(room.transfers.is_busy or room.inbox for room in rooms):
        room = source.choice(rooms)
        if room.inbox and source.random() < 0.5:
            assert room.transfer is not None
            room.transfer.receive(*room.inbox.pop(source.randrange(len(room.inbox))))
        else:
            room.transfers.advance(1e-4)
        for other in rooms:
            other.require_laws()
