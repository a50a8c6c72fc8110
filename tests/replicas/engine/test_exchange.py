"""Laws of drops, of pipelines that grow, and of weights that come back: real memory, members heard at random."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from pengserve.planners.layer_sizes import LayerSizes
from pengserve.planners.stages import Parts, stage_layers, stage_of
from pengserve.planners.types.errors import EngineError, StepError
from pengserve.replicas.engine.movers import exchange as exchange_module
from pengserve.replicas.engine.movers.exchange import DropExchange
from pengserve.replicas.engine.movers.restore import LayerRestore
from pengserve.replicas.engine.movers.weights_return import WeightsReturn
from pengserve.replicas.engine.tiers.stage_host import StageHost
from pengserve.replicas.kv.channel import PeerChannel
from pengserve.replicas.kv.ledger import CellLedger
from pengserve.replicas.kv.table import CellTable
from pengserve.replicas.kv.tiers import DeviceTier
from pengserve.replicas.kv.transfers import Transfers
from pengserve.replicas.memory.arena.open import open_arena
from pengserve.replicas.memory.layers import LayerMemory
from tests.support.thread_exchange import ThreadExchange

pytestmark = pytest.mark.slow  # imports vLLM

CHUNK, BLOCK, TOKENS, LAYERS = 64 << 10, 24 << 10, 4, 5
SIZES = LayerSizes(num_chunks=120, chunk_bytes=CHUNK, weight_bytes=(300_000,) * LAYERS, block_bytes=BLOCK)


class Member:
    """One member's memory and table, and of vLLM only what an exchange asks for."""

    def __init__(self, rank: int, size: int, requests: dict[str, list[int]]) -> None:
        self.rank, self.requests = rank, requests
        self.arena = open_arena(torch.device("cpu"), SIZES.num_chunks * CHUNK, CHUNK)
        self.layers = LayerMemory(self.arena, SIZES, fewest_layers=1)
        self.lane = make_lane(rank, size)
        filled: list[int] = []
        memory = SimpleNamespace(
            layers=self.layers, drop_weights=self.layers.drop_weights, note_filled=filled.append, weight_order=0
        )
        self.filled = filled
        self.ledger = CellLedger(SIZES.num_blocks(SIZES.all_layers), "dp")
        self.lanes = SimpleNamespace(
            dp=SimpleNamespace(memory=memory, block_ids=requests.__getitem__, tiers=None),
            running=None,
            tier=DeviceTier(self.layers, self.ledger),
            transfers=Transfers(self.ledger),
        )
        for layer in range(LAYERS):
            self.layers.weights(layer).fill_(layer + 1)
            for request_id, block_ids in requests.items():
                for index, block_id in enumerate(block_ids):
                    self.layers.kv(layer)[block_id].fill_(content(request_id, index, layer))

    def has(self, request_id: str, logical_ids: list[int], num_blocks: int) -> bool:
        """Whether this member's layers have the KV of a request, where its table says."""
        physical = self.lane.table.physical(logical_ids[:num_blocks])
        return all(
            (self.layers.kv(layer)[block_id] == content(request_id, index, layer)).all()
            for layer in range(*self.lane.layers)
            for index, block_id in enumerate(physical)
        )


def make_lane(rank: int, size: int) -> Any:
    ranges = stage_layers(LAYERS, size)
    num_blocks = min(SIZES.num_blocks(layers) for layers in ranges) - 1
    return SimpleNamespace(
        name=f"pp{size}",
        rank=rank,
        num_stages=size,
        stages=ranges,
        layers=ranges[stage_of(rank, size)],
        capacity=SimpleNamespace(num_blocks=num_blocks),
        table=CellTable(num_blocks + 1),
        blocks_for=lambda num_tokens: -(-num_tokens // TOKENS),
        adopt=lambda request: None,
        runner=SimpleNamespace(requests={}, input_batch=None),
        host=StageHost(CellTable(num_blocks + 1)),
    )


def content(request_id: str, index: int, layer: int) -> int:
    return (sum(request_id.encode()) * 7 + index * 3 + layer * 11) % 251


@pytest.fixture(params=[2, 4])
def members(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Member]]:
    """Members whose requests have blocks all over; two of the first member's share a block (a cached prefix)."""
    monkeypatch.setattr(exchange_module, "revive", lambda handoff, client: None)
    source = random.Random(request.param)
    found = []
    for rank in range(request.param):
        free = source.sample(range(1, SIZES.num_blocks(SIZES.all_layers)), 20)
        found.append(Member(rank, request.param, {f"r{rank}.{i}": [free.pop() for _ in range(3)] for i in range(4)}))
    first = found[0]
    first.requests["r0.1"][0] = first.requests["r0.0"][0]
    for layer in range(LAYERS):
        first.layers.kv(layer)[first.requests["r0.0"][0]].fill_(content("r0.0", 0, layer))
    yield found
    for member in found:
        member.arena.close()


def travellers(members: list[Member]) -> list[Any]:
    """All requests, with logical blocks (one more than they have filled) and some tokens in their last block."""
    ids = iter(random.Random(5).sample(range(1, members[0].lane.capacity.num_blocks + 1), 16 * len(members)))
    return [
        SimpleNamespace(
            request_id=request_id, rank=m.lane.rank, logical_ids=[next(ids) for _ in range(4)],
            num_tokens=3 * TOKENS - 1, handoff=None, part_ids=[], rows=[], host_rows=[],
        )
        for m in members
        for request_id in m.requests
    ]  # fmt: skip


def run(members: list[Member], parts: list[Any], seed: int) -> list[int]:
    """Lets members send and hear in a random order, until nobody has anything left; ranks that said they were done."""
    source, done, queues = random.Random(seed), [], [[] for _ in parts]
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
        for member in members:
            assert member.ledger.check() == () and member.lanes.transfers.check() == ()
    assert all(member.ledger.num_in_flight == 0 for member in members)
    return sorted(done)


def drop(members: list[Member], seed: int = 1) -> tuple[list[Any], list[int]]:
    wave = travellers(members)
    return wave, form(members, wave, Parts(LAYERS, (1,) * len(members)), seed)


def form(members: list[Member], wave: list[Any], parts: Parts, seed: int) -> list[int]:
    """The members' lanes come to run; how many of the blocks that no request has got memory before any KV came."""
    used = {logical for t in wave for logical in t.logical_ids}
    order = [i for i in range(1, members[0].lane.capacity.num_blocks + 1) if i not in used]
    exchanges = [DropExchange(m.lanes, m.lane, parts) for m in members]
    backed = [exchange.begin(wave, order) for exchange in exchanges]
    assert run(members, exchanges, seed) == list(range(len(members)))
    return backed


def grow(members: list[Member], sizes: tuple[int, ...], seed: int) -> tuple[list[Any], list[int]]:
    """The pipeline of all, formed of parts of such sizes, of which the wider ones were formed before."""
    parts, wave = Parts(LAYERS, sizes), travellers(members)
    for index, size in enumerate(sizes):
        start = parts.start(index)
        part = members[start : start + size]
        if size > 1:
            for rank, member in enumerate(part):
                member.lane = make_lane(rank, size)
            of_part, _ = drop(part, seed)
            origins = {t.request_id: t.logical_ids for t in of_part}
            for traveller in wave:
                if traveller.request_id in origins:
                    traveller.rank, traveller.part_ids = start, origins[traveller.request_id]
            for member in part:
                member.lanes.running = member.lane
    for rank, member in enumerate(members):
        member.lane = make_lane(rank, len(members))
    return wave, form(members, wave, parts, seed)


@pytest.mark.parametrize("seed", range(4))
def test_after_a_drop_every_member_has_its_layers_of_all_requests(members: list[Member], seed: int) -> None:
    wave, _ = drop(members, seed)
    for member in members:
        assert member.layers.check(member.lane.layers, SIZES.num_blocks(member.lane.layers)) == ()
        physical = member.lane.table.physical(member.lane.table.leased())
        assert len(set(physical)) == len(physical) == member.lane.capacity.num_blocks
        for traveller in wave:
            if traveller.request_id != "r0.1":  # its first block is another request's: see the next test
                assert member.has(traveller.request_id, traveller.logical_ids, 3), (member.rank, traveller.request_id)


def test_a_shared_block_becomes_two_with_the_same_content(members: list[Member]) -> None:
    wave, _ = drop(members)
    one, other = (next(t for t in wave if t.request_id == i).logical_ids[0] for i in ("r0.0", "r0.1"))
    for member in members:
        a, b = member.lane.table.physical([one, other])
        assert a != b
        for layer in range(*member.lane.layers):
            assert torch.equal(member.layers.kv(layer)[a], member.layers.kv(layer)[b])


@pytest.mark.parametrize("members", [4], indirect=True)
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_in_a_pipeline_of_pipelines_every_member_has_its_layers_of_all_requests(
    members: list[Member], sizes: tuple[int, ...], seed: int
) -> None:
    wave, backed = grow(members, sizes, seed)
    assert min(backed) > 0, "new requests have room before any KV has come"
    for member in members:
        assert member.layers.check(member.lane.layers, SIZES.num_blocks(member.lane.layers)) == ()
        physical = member.lane.table.physical(member.lane.table.leased())
        assert len(set(physical)) == len(physical) == member.lane.capacity.num_blocks
        for traveller in wave:
            assert traveller.request_id == "r0.1" or member.has(traveller.request_id, traveller.logical_ids, 3)


def test_a_drop_makes_room_before_any_kv_has_come(members: list[Member]) -> None:
    _, backed = drop(members)
    assert min(backed) > 0


def test_weights_come_back_and_what_is_in_use_keeps_its_kv(members: list[Member]) -> None:
    wave, _ = drop(members)
    used = {logical for t in wave for logical in t.logical_ids}
    left = min(SIZES.num_blocks_beside(SIZES.all_layers, m.lane.layers) for m in members) - 1
    free = [i for i in range(members[0].lane.capacity.num_blocks, 0, -1) if i not in used]
    withheld = free[: members[0].lane.capacity.num_blocks - left]
    parts = [WeightsReturn(m.lanes, m.lane, Parts(LAYERS, (1,) * len(members))) for m in members]
    for part in parts:
        part.begin(withheld)
    assert run(members, parts, seed=3) == list(range(len(members)))
    for member in members:
        assert sorted(member.filled) == [layer for layer in range(LAYERS) if layer not in range(*member.lane.layers)]
        assert all((member.layers.weights(layer) == layer + 1).all() for layer in range(LAYERS))
        for traveller in wave:
            if traveller.request_id != "r0.1":
                assert member.has(traveller.request_id, traveller.logical_ids, 3)
    for part, member in zip(parts, members, strict=True):
        part.undo()
        assert member.layers.check(member.lane.layers, SIZES.num_blocks(member.lane.layers)) == ()


@pytest.mark.parametrize(
    ("members", "sizes"), [(2, (1, 1)), (4, (1, 1, 1, 1)), (4, (2, 2)), (4, (1, 1, 2))], indirect=["members"]
)
def test_after_a_restore_every_member_has_what_its_part_needs(members: list[Member], sizes: tuple[int, ...]) -> None:
    wave, _ = drop(members)
    parts = Parts(LAYERS, sizes)
    bring_back(members, wave, parts)
    blocks = [
        iter(range(SIZES.num_pipeline_blocks(stage_layers(LAYERS, size)), 0, -1)) for size in sizes
    ]  # what each part's scheduler hands out
    for index, traveller in enumerate(wave):
        part = index % len(sizes)
        traveller.rank, traveller.part_ids = parts.start(part), [next(blocks[part]) for _ in range(4)]
    group = ThreadExchange()
    with ThreadPoolExecutor(len(members)) as pool:
        restores = [LayerRestore(m.lanes, m.lane, parts, group.communicator(m.rank)) for m in members]
        list(pool.map(lambda restore: restore.run(wave), restores))
    for member in members:
        layers = parts.layers(member.rank)
        assert member.layers.check(layers, SIZES.num_blocks(layers)) == ()
        assert all((member.layers.weights(layer) == layer + 1).all() for layer in range(*layers))
        mine = [t for t in wave if parts.of(t.rank) == parts.of(member.rank) and t.request_id != "r0.1"]
        assert mine and all(
            (member.layers.kv(layer)[block_id] == content(t.request_id, index, layer)).all()
            for t in mine
            for index, block_id in enumerate(t.part_ids[:3])
            for layer in range(*layers)
        )


def bring_back(members: list[Member], wave: list[Any], parts: Parts) -> None:
    used = {logical for t in wave for logical in t.logical_ids}
    left = min(SIZES.num_blocks_beside(parts.layers(m.rank), m.lane.layers) for m in members) - 1
    free = [i for i in range(members[0].lane.capacity.num_blocks, 0, -1) if i not in used]
    returns = [WeightsReturn(m.lanes, m.lane, parts) for m in members]
    for returning in returns:
        returning.begin(free[: members[0].lane.capacity.num_blocks - left])
    assert run(members, returns, seed=3) == list(range(len(members)))


def test_weights_without_room_are_refused_and_nothing_has_changed(members: list[Member]) -> None:
    drop(members)
    member = max(members, key=lambda m: m.lane.layers[1] - m.lane.layers[0])
    before = member.lane.table.physical(member.lane.table.leased())
    with pytest.raises(StepError, match="have no room"):
        WeightsReturn(member.lanes, member.lane, Parts(LAYERS, (1,) * len(members))).begin([])
    assert member.lane.table.physical(member.lane.table.leased()) == before


def test_weights_in_another_order_are_refused(members: list[Member]) -> None:
    drop(members)
    members[0].lanes.dp.memory.weight_order = 1
    with pytest.raises(EngineError, match="packs weights in another way"):
        bring_back(members, [], Parts(LAYERS, (1,) * len(members)))
