"""Members of drops and restores: real memory, tables and tiers, and of vLLM only what an exchange asks for."""

import random
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from pengserve.planners.layer_sizes import LayerSizes
from pengserve.planners.stages import Parts, stage_layers, stage_of
from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.movers.exchange import DropExchange
from pengserve.replicas.engine.tiers.stage_tiers import StageTiers, pipeline_sizes
from pengserve.replicas.kv.channel import PeerChannel
from pengserve.replicas.kv.host_tier import HostTier
from pengserve.replicas.kv.ledger import CellLedger
from pengserve.replicas.kv.pool import DevicePool
from pengserve.replicas.kv.table import CellTable
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.kv.tiers import DeviceTier
from pengserve.replicas.kv.transfers import Transfers
from pengserve.replicas.memory.arena.open import open_arena
from pengserve.replicas.memory.layers import LayerMemory

CHUNK, TOKENS, LAYERS, RESERVED = 64 << 10, 4, 5, 3
NUM_BLOCKS = 3  # of a request that hold KV; the lane gives it one more


class Kind(NamedTuple):
    """What members have."""

    sizes: LayerSizes
    host_rows: int  # 0: no host tier
    num_requests: int  # of each member


def _sizes(num_chunks: int, block_bytes: int) -> LayerSizes:
    weights = (300_000,) * LAYERS
    return LayerSizes(num_chunks=num_chunks, chunk_bytes=CHUNK, weight_bytes=weights, block_bytes=block_bytes)


PLAIN = Kind(_sizes(120, 24 << 10), 0, 4)
TIERED = Kind(_sizes(50, 16 << 10), 90, 4)
FULL = Kind(_sizes(50, 16 << 10), 90, 9)  # an instance has 19 blocks on its device, and its requests 27


class Lane(PpLane):
    """A stage's memory, table and tiers."""

    def __init__(self, rank: int, size: int, memory: LayerMemory, base: TieredKv | None) -> None:
        self.rank, self.stage, self.stages = rank, stage_of(rank, size), stage_layers(LAYERS, size)
        self.layers, has_host = self.stages[self.stage], base is not None
        self.group: Any = SimpleNamespace(world_size=size, unique_name=f"pp{size}")
        self.sizes = pipeline_sizes(memory.sizes, self.stages, max_blocks=10, has_host=has_host)
        self.tiers = StageTiers(base, memory, self.sizes, self.stage, TOKENS) if base is not None else None
        num_blocks = self.sizes.num_usable(self.sizes.smallest, self.num_host_rows)
        self.capacity: Any = SimpleNamespace(num_blocks=num_blocks, block_size=TOKENS)
        self.table = CellTable(num_blocks + 1)
        self.runner: Any = SimpleNamespace(requests={}, input_batch=None)

    def adopt(self, request: Any) -> None:
        """There is no runner."""


class Member:
    """One member of rank `rank`, and its requests by name: the blocks of `dp` that hold their KV."""

    def __init__(self, rank: int, size: int, kind: Kind, requests: dict[str, list[int]]) -> None:
        self.rank, self.kind, self.requests = rank, kind, requests
        self.arena = open_arena(torch.device("cpu"), kind.sizes.num_chunks * CHUNK, CHUNK)
        self.layers = LayerMemory(self.arena, kind.sizes, fewest_layers=1)
        self.tiers: TieredKv | None = None  # of `dp`
        if kind.host_rows:
            base, block_bytes = self.layers.base_blocks, kind.sizes.block_bytes
            pool = DevicePool(self.layers.side_by_side(), LAYERS, base, block_bytes)
            host = HostTier(LAYERS, kind.host_rows, block_bytes)
            self.tiers = TieredKv(pool, host, num_blocks=num_dp_blocks(kind), block_size=TOKENS)
        self.filled: list[int] = []
        memory = SimpleNamespace(
            layers=self.layers, drop_weights=self.layers.drop_weights, note_filled=self.filled.append, weight_order=0
        )
        self.ledger = CellLedger(self.layers.base_blocks, "dp")
        self.lanes: Any = SimpleNamespace(
            dp=SimpleNamespace(memory=memory, block_ids=requests.__getitem__, tiers=self.tiers),
            running=None,
            tier=DeviceTier(self.layers, self.ledger),
            transfers=Transfers(self.ledger),
        )
        self.lane = self.new_lane(rank, size)
        for layer in range(LAYERS):
            self.layers.weights(layer).fill_(layer + 1)
        if self.tiers is not None:
            self.tiers.claim(np.unique(list(requests.values())))
        for request_id, blocks in requests.items():
            self.write(self.lanes.dp, request_id, blocks)

    def new_lane(self, rank: int, size: int) -> Lane:
        """A pipeline's, in which this member has this rank."""
        return Lane(rank, size, self.layers, self.tiers)

    def write(self, lane: Any, request_id: str, blocks: Sequence[int]) -> None:
        """KV of a request, in blocks of this member that have a place."""
        for layer in self._layers_of(lane):
            for index, block in enumerate(blocks):
                for side in self._sides(lane, layer, block):
                    side.view(torch.int64).fill_(content(request_id, index, layer))

    def has(self, request_id: str, logical_ids: Sequence[int], count: int = NUM_BLOCKS, lane: Any = None) -> bool:
        """Whether the first blocks of a request hold its KV in all layers of a lane, wherever they are said to be."""
        lane = lane or self.lane
        return self.holds(lane, request_id, lane.table.physical(logical_ids[:count]))

    def holds(self, lane: Any, request_id: str, blocks: Sequence[int]) -> bool:
        """As `has`, of physical blocks; also of `dp`."""
        for layer in self._layers_of(lane):
            for index, block in enumerate(blocks):
                sides = self._sides(lane, layer, block)
                wanted = content(request_id, index, layer)
                if not sides or not all(bool((side.view(torch.int64) == wanted).all()) for side in sides):
                    return False
        return True

    def _layers_of(self, lane: Any) -> range:
        return range(*lane.layers) if isinstance(lane, Lane) else range(LAYERS)

    def _sides(self, lane: Any, layer: int, block: int) -> list[torch.Tensor]:
        """Where the KV of a physical block is in one layer of the model: on the device, on the host, or both."""
        tiers = lane.tiers.kv if isinstance(lane.tiers, StageTiers) else lane.tiers
        if tiers is None:
            return [self.layers.kv(layer)[block]]
        own, placement = layer - self._layers_of(lane)[0], tiers.placement
        sides = [tiers.pool.layer(own)[placement.index[own, block]]] if placement.index[own, block] else []
        if placement.on_host[own, block]:
            sides.append(tiers.host.cells[int(tiers.host.at(own, placement.row[[block]])[0])])
        return sides

    def num_on_host(self, lane: Any, blocks: Sequence[int]) -> int:
        """Of physical blocks, those that are not on the device in all layers."""
        tiers = lane.tiers.kv if isinstance(lane.tiers, StageTiers) else lane.tiers
        return int((tiers.placement.index[:, blocks] == 0).any(axis=0).sum())

    def check(self) -> tuple[str, ...]:
        """Laws that are broken, in sentences."""
        wrong = [*self.ledger.check(), *self.lanes.transfers.check(), *self.layers.check_chunks()]
        wrong += self.tiers.check() if self.tiers is not None else ()
        wrong += self.lane.tiers.check() if self.lane.tiers is not None else ()
        return tuple(wrong)

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()
        self.arena.close()


def num_dp_blocks(kind: Kind) -> int:
    """Logical blocks of `dp`, the null block included."""
    base = kind.sizes.num_blocks(kind.sizes.all_layers)
    return base + max(0, kind.host_rows - RESERVED) if kind.host_rows else base


def content(request_id: str, index: int, layer: int) -> int:
    """Of one block in one layer. Two of the first member's requests begin with one block, a cached prefix."""
    name = "r0.0" if (request_id, index) == ("r0.1", 0) else request_id
    return zlib.crc32(f"{name} {index} {layer}".encode())


def some_members(count: int, kind: Kind, seed: int = 1) -> list[Member]:
    """Their requests have blocks all over; with a host tier, these are on both sides, and on their way."""
    rng, found = random.Random(seed), []
    for rank in range(count):
        free = rng.sample(range(1, num_dp_blocks(kind)), NUM_BLOCKS * kind.num_requests)
        names = [f"r{rank}.{i}" for i in range(kind.num_requests)]
        requests = {name: [free.pop() for _ in range(NUM_BLOCKS)] for name in names}
        if rank == 0:
            requests["r0.1"][0] = requests["r0.0"][0]
        found.append(member := Member(rank, count, kind, requests))
        if member.tiers is not None:
            move_some(member.tiers, sorted({b for blocks in requests.values() for b in blocks}), rng)
    return found


def move_some(tiers: TieredKv, blocks: Sequence[int], rng: random.Random) -> None:
    """KV moves between device and host, as requests come and go. Some copies are under way on return."""
    for _ in range(6):
        chosen = np.array(rng.sample(list(blocks), 5))
        layers = rng.sample(range(tiers.pool.num_layers), rng.randint(0, tiers.pool.num_layers))
        way = rng.choice(["behind", "bring", "place"])
        if way == "behind":
            tiers.write_behind(chosen)
        elif way == "bring":
            tiers.bring(chosen, chosen)
        else:
            tiers.place(chosen, layers)


def travellers(members: Sequence[Member]) -> list[Any]:
    """All requests, with logical blocks (one more than they have filled) and some tokens in their last block."""
    num_each = (NUM_BLOCKS + 1) * members[0].kind.num_requests
    ids = iter(random.Random(5).sample(range(1, members[0].lane.capacity.num_blocks + 1), num_each * len(members)))
    return [
        SimpleNamespace(
            request_id=request_id, rank=m.lane.rank, logical_ids=[next(ids) for _ in range(NUM_BLOCKS + 1)],
            num_tokens=NUM_BLOCKS * TOKENS - 1, handoff=None, part_ids=[],
        )
        for m in members
        for request_id in m.requests
    ]  # fmt: skip


def run(members: Sequence[Member], parts: Sequence[Any], seed: int) -> list[int]:
    """Lets members send and hear in a random order, until there is nothing left; ranks that said they were done."""
    source, done, queues = random.Random(seed), list[int](), [list[Any]() for _ in parts]
    for rank, part in enumerate(parts):
        part.start(
            PeerChannel(lambda to, data, rank=rank: queues[to].append((rank, [bytearray(bytes(p)) for p in data]))),
            lambda rank=rank: done.append(rank),
        )
    while any(member.lanes.transfers.is_busy for member in members) or any(queues):
        rank = source.randrange(len(parts))
        if queues[rank] and source.random() < 0.5:
            parts[rank].receive(*queues[rank].pop(0))
        else:
            members[rank].lanes.transfers.advance(1e-4)
        assert not (wrong := members[rank].check()), wrong
    assert not any(member.ledger.num_in_flight for member in members)
    return sorted(done)


class Formed(NamedTuple):
    """A pipeline's lanes that run."""

    wave: list[Any]  # requests with KV
    new: list[int]  # logical blocks that had room before any KV had come, and were written then


def drop(members: Sequence[Member], seed: int = 1) -> Formed:
    """Instances alone become one pipeline."""
    return form(members, travellers(members), Parts(LAYERS, (1,) * len(members)), seed)


def form(members: Sequence[Member], wave: list[Any], parts: Parts, seed: int) -> Formed:
    """The members' lanes come to run. New requests get all the room that there is before any KV comes."""
    order = unused(members, wave)
    exchanges = [DropExchange(m.lanes, m.lane, parts) for m in members]
    begun = [exchange.begin(wave, order) for exchange in exchanges]
    new = order[: min(num_backed for num_backed, _ in begun)]
    for member, (_, num_columns) in zip(members, begun, strict=True):
        assert num_columns < member.layers.num_blocks(member.lane.layers[0])
        assert not (wrong := member.check()), wrong
        blocks = member.lane.table.physical(new)
        if member.lane.tiers is not None:
            assert num_columns <= len(member.lane.tiers.kv.placement.free_columns()), "so many fit on the device"
            member.lane.tiers.kv.claim(np.array(blocks, dtype=np.int64))
        member.write(member.lane, "new", blocks)
    assert run(members, exchanges, seed) == list(range(len(members)))
    return Formed(wave, new)


def unused(members: Sequence[Member], wave: Sequence[Any]) -> list[int]:
    """Logical blocks of the lane that no request of the wave has."""
    used = {logical for t in wave for logical in t.logical_ids}
    return [i for i in range(1, members[0].lane.capacity.num_blocks + 1) if i not in used]


def grow(members: Sequence[Member], sizes: tuple[int, ...], seed: int) -> Formed:
    """The pipeline of all, formed of parts of such sizes, of which the wider ones were formed before."""
    parts, wave, rng = Parts(LAYERS, sizes), travellers(members), random.Random(seed)
    for index, size in enumerate(sizes):
        start = parts.start(index)
        part = members[start : start + size]
        if size > 1:
            for rank, member in enumerate(part):
                member.lane = member.new_lane(rank, size)
            of_part = drop(part, seed).wave
            origins = {t.request_id: t.logical_ids for t in of_part}
            for traveller in wave:
                if traveller.request_id in origins:
                    traveller.rank, traveller.part_ids = start, origins[traveller.request_id]
            for member in part:
                member.lanes.running = member.lane
                move_kv_of(member, of_part, rng)
    for rank, member in enumerate(members):
        member.lane = member.new_lane(rank, len(members))
    formed = form(members, wave, parts, seed)
    for member in members:
        if member.lanes.running is not None:
            member.lanes.running.give_up_host()
            member.lanes.running = None
    return formed


def move_kv_of(member: Member, wave: Sequence[Any], rng: random.Random) -> None:
    """As requests come and go in a pipeline."""
    if member.lane.tiers is not None:
        blocks = [b for t in wave for b in member.lane.table.physical(t.logical_ids[:NUM_BLOCKS])]
        move_some(member.lane.tiers.kv, blocks, rng)
