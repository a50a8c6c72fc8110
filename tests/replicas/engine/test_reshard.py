"""Laws of a merge's waves over real memory: members that have no block to spare still keep all KV."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.planners.waves import Mover, merge_wave
from pengserve.replicas.engine.lanes.kv_shares import KvShare, LaneKv, shares_of
from pengserve.replicas.engine.movers import reshard as reshard_module
from pengserve.replicas.engine.movers.reshard import Resharder, Traveller
from pengserve.replicas.kv.ledger import CellLedger
from pengserve.replicas.kv.table import CellTable
from pengserve.replicas.kv.transfers import Transfers
from pengserve.replicas.memory.kv_views import KvView, block_layout
from pengserve.replicas.memory.weight_views import Shard
from tests.support.thread_exchange import ThreadExchange

pytestmark = pytest.mark.slow  # imports vLLM

HEADS, BLOCK, DIM, LAYERS = 4, 8, 4, 2


def packed_view(layers: Sequence[torch.Tensor], num_heads: int, num_tokens: int) -> KvView:
    """Blocks as vLLM's CPU kernels pack them: K is `[head, D, tokens]`, V `[head, tokens, D]`."""

    def write(keys: torch.Tensor, values: torch.Tensor, block: torch.Tensor) -> None:
        view = block.view(num_heads, 2, num_tokens * DIM)
        view[:, 0] = keys.permute(1, 2, 0).reshape(num_heads, -1)
        view[:, 1] = values.permute(1, 0, 2).reshape(num_heads, -1)

    sizes = {"num_heads": num_heads, "num_tokens": num_tokens, "head_size": DIM}
    return KvView(layers, block_layout(write, **sizes, dtype=torch.float32, device=torch.device("cpu")))


def content(request_id: str, num_tokens: int) -> torch.Tensor:
    """KV of a request, as tiles of a `dp` block."""
    generator = torch.Generator().manual_seed(sum(request_id.encode()))
    return torch.randn(LAYERS, 2, -(-num_tokens // BLOCK), HEADS, BLOCK * DIM, generator=generator)


class Member:
    """Memory of one member, its blocks, and of its lanes what a resharder asks for."""

    def __init__(
        self,
        rank: int,
        size: int,
        lengths: dict[str, int],
        source: random.Random,
        *,
        part: tuple[int, int] = (0, 1),
        num_blocks: int = 0,
        num_heads: int = 0,
        tp_tokens: int = 0,
    ) -> None:
        """Without `num_blocks` none is free; without the last ones, heads are spread over `size` members.

        `part`: rank in its part, and how many members that has. Its requests have the same logical blocks everywhere.
        """
        own_rank, degree = part
        self.part_tokens = BLOCK * degree  # of a block of the part's lane
        needed = {request_id: -(-tokens // self.part_tokens) for request_id, tokens in lengths.items()}
        num_blocks = num_blocks or sum(needed.values())
        layers = [torch.zeros(num_blocks + 1, 2 * HEADS * BLOCK * DIM) for _ in range(LAYERS)]
        self.free = source.sample(range(1, num_blocks + 1), num_blocks)
        self.ledger, self.table = CellLedger(num_blocks + 1, "dp"), CellTable(4 * num_blocks + 1)
        self.dp_view = packed_view(layers, HEADS, BLOCK)
        self.tp_view = packed_view(layers, num_heads or HEADS // size, tp_tokens or BLOCK * size)
        part_view = packed_view(layers, HEADS // degree, self.part_tokens)
        first, stop = self.part_heads = Shard(own_rank, degree).heads(HEADS)
        self.blocks: dict[str, list[int]] = {}  # physical
        self.logical: dict[str, list[int]] = {}  # of the part's lane
        part_table = CellTable(num_blocks + 1)
        for request_id, tokens in lengths.items():
            self.blocks[request_id] = [self.free.pop() for _ in range(needed[request_id])]
            begun = 1 + sum(map(len, self.logical.values()))
            self.logical[request_id] = list(range(begun, begun + needed[request_id]))
            part_table.lease(self.logical[request_id], self.blocks[request_id])
            tiles = part_view.tiles([(self.blocks[request_id], tokens)], BLOCK)
            part_view.write(tiles, content(request_id, tokens)[:, :, :, first:stop], (0, stop - first))
        self.adopted: list[Any] = []
        share = KvShare((0, LAYERS), (first, stop))
        physical: Any = list if degree == 1 else part_table.physical
        self.part: Any = SimpleNamespace(
            block_ids=self.blocks.__getitem__, kv=lambda view: LaneKv(part_view, share, BLOCK, physical)
        )
        self.lanes: Any = SimpleNamespace(dp_view=lambda: self.dp_view, transfers=Transfers(self.ledger))
        shape = f"tp{size}"
        wide = shares_of(shape, LAYERS, HEADS)[rank]
        self.lane: Any = SimpleNamespace(
            name=shape,
            shape=shape,
            rank=rank,
            kv=lambda view: LaneKv(self.tp_view, wide, BLOCK, self.table.physical),
            adopt=self.adopted.append,
        )

    def resharder(self, parts: Sequence[Group], group: ThreadExchange) -> Resharder:
        return Resharder(self.lanes, self.lane, self.part, parts, group.communicator(self.lane.rank))

    def take_wave(self, resharder: Resharder, wave: list[Traveller], lease: list[int]) -> None:
        """As `Merge.take`; what is freed is overwritten before anybody can read it again."""
        collected = resharder.collect(wave)
        for traveller in wave:
            self.free += self.blocks.pop(traveller.request_id, [])
        for block_id in self.free:
            tiles = self.dp_view.tiles([([block_id], BLOCK)], BLOCK)
            self.dp_view.write(tiles, torch.full((LAYERS, 2, 1, HEADS, BLOCK * DIM), torch.nan), (0, HEADS))
        physical, self.free = self.free[: len(lease)], self.free[len(lease) :]
        self.table.lease(lease, physical)
        self.ledger.move(physical, "dp", "tp")
        resharder.place(wave, collected)


def groups_of(sizes: Sequence[int]) -> tuple[Group, ...]:
    """Neighbours in groups of so many members."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    found = []
    for start, size in zip(starts, sizes, strict=True):
        members = tuple(map(InstanceId, range(start, start + size)))
        found.append(Group(kind=GroupKind.TP if size > 1 else GroupKind.DP, members=members))
    return tuple(found)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_a_split_gives_all_heads_to_members_that_have_room(size: int, seed: int) -> None:
    """With eight members two have each head; one of them sends it."""
    source, num_heads = random.Random(seed), max(1, HEADS // size)
    wide = BLOCK * HEADS // num_heads  # tokens of a block of the group
    lengths = {f"r{i}": source.randrange(1, 3 * wide) for i in range(10)}
    logical = {name: [10 * i + j + 1 for j in range(3)] for i, name in enumerate(lengths)}
    wave, members, group = [], [], ThreadExchange()
    for name, count in lengths.items():
        handoff: Any = SimpleNamespace(num_computed_tokens=count)
        wave.append(Traveller(name, source.randrange(size), logical[name], handoff))
    for rank in range(size):
        member = Member(rank, size, {}, source, num_blocks=150, num_heads=num_heads, tp_tokens=wide)
        first, stop = Shard(rank, size).heads(HEADS)
        for name, ids in logical.items():
            member.table.lease(ids, [member.free.pop() for _ in ids])
            tiles = member.tp_view.tiles([(member.table.physical(ids), lengths[name])], BLOCK)
            member.tp_view.write(tiles, content(name, lengths[name])[:, :, :, first:stop], (0, stop - first))
        members.append(member)
    refused = {t.request_id for t in wave if source.random() < 0.4}

    def split(member: Member) -> list[str]:
        def admit(traveller: Traveller) -> list[int] | None:
            if traveller.request_id in refused:
                return None
            ids = [member.free.pop() for _ in range(-(-traveller.num_tokens // BLOCK))]
            return member.blocks.setdefault(traveller.request_id, ids)

        return member.resharder(groups_of([1] * size), group).split(wave, admit)

    with ThreadPoolExecutor(size) as pool:
        told = list(pool.map(split, members))
    assert sorted(name for names in told for name in names) == sorted(refused)
    for traveller in wave:
        name, member = traveller.request_id, members[traveller.rank]
        assert (name in member.blocks) == (name not in refused)
        if name not in refused:
            tiles = member.dp_view.tiles([(member.blocks[name], lengths[name])], BLOCK)
            assert torch.equal(member.dp_view.read(tiles, (0, HEADS)), content(name, lengths[name]))
    for member in members:
        assert member.ledger.check() == () and member.ledger.num_in_flight == 0
        assert member.lanes.transfers.check() == ()


@pytest.mark.parametrize("sizes", [(1, 1), (1, 1, 1, 1), (2, 2), (2, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_members_without_a_free_block_merge_and_keep_all_kv(
    sizes: tuple[int, ...], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parts that are instances alone, or narrower groups whose members have a share of the heads each."""
    size, parts = sum(sizes), groups_of(sizes)
    wide = size * BLOCK  # tokens of a block of the group
    monkeypatch.setattr(reshard_module, "revive", lambda handoff, client: handoff)
    monkeypatch.setattr("pengserve.planners.waves.MAX_WAVE_TOKENS", 4 * wide)  # one or two of each member in a wave
    source = random.Random(seed)
    # With their next tokens (`Lane.blocks_needed`) they fill the group's blocks nearly, and just as many bytes of `dp`.
    counts = [source.randrange(2, 5) * wide - source.randrange(1, BLOCK) for _ in range(5)]
    lengths = [
        {f"r{part.leader}.{i}.{j}": count for i, count in enumerate(counts) for j in range(part.degree)}
        for part in parts
    ]
    members = [
        Member(rank, size, mine, source, part=(part.members.index(InstanceId(rank)), part.degree))
        for part, mine in zip(parts, lengths, strict=True)
        for rank in part.members
    ]
    group = ThreadExchange()
    resharders = [member.resharder(parts, group) for member in members]
    all_lengths = {request_id: count for mine in lengths for request_id, count in mine.items()}
    left = tuple(
        Mover(
            request_id=request_id,
            ranks=part.members,
            num_tokens=count,
            num_needed=-(-(count + 1) // wide),
            num_own=len(members[part.leader].blocks[request_id]),
        )
        for part, mine in zip(parts, lengths, strict=True)
        for request_id, count in mine.items()
    )
    logical: dict[str, list[int]] = {}
    num_waves = 0
    with ThreadPoolExecutor(size) as pool:
        while left:
            free = [len(member.free) for member in members]
            assert set(free) == {0}
            plan = merge_wave(left, free)
            assert not plan.given_up
            wave, lease = [], []
            for mover in plan.moving:
                first = 1 + sum(map(len, logical.values()))
                ids = list(range(first, first + mover.num_needed))
                logical[mover.request_id] = ids
                lease += ids
                handoff: Any = SimpleNamespace(num_computed_tokens=mover.num_tokens)
                traveller = Traveller(mover.request_id, mover.ranks[0], ids, handoff)
                if len(mover.ranks) > 1:
                    traveller.part_ids = members[mover.ranks[0]].logical[mover.request_id]
                wave.append(traveller)
            done = [
                pool.submit(member.take_wave, resharder, wave, lease)
                for member, resharder in zip(members, resharders, strict=True)
            ]
            [future.result(20) for future in done]
            left, num_waves = plan.left, num_waves + 1
    assert num_waves > 1
    for rank, member in enumerate(members):
        first, stop = Shard(rank, size).heads(HEADS)
        assert member.ledger.check() == () and member.blocks == {}
        assert member.lanes.transfers.check() == () and member.ledger.num_in_flight == 0
        assert member.ledger.num_leased("tp") == sum(map(len, logical.values()))
        assert len(member.adopted) == len(all_lengths)
        for request_id, count in all_lengths.items():
            tiles = member.tp_view.tiles([(member.table.physical(logical[request_id]), count)], BLOCK)
            found = member.tp_view.read(tiles, (0, stop - first))
            assert torch.equal(found, content(request_id, count)[:, :, :, first:stop]), (rank, request_id)
