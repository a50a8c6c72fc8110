"""Laws of drops, of pipelines that grow, and of weights that come back: real memory, members heard at random.

Without a host tier, and with one, on which part of the KV is that is more than the devices hold.
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from pengserve.planners.stages import Parts, stage_layers
from pengserve.planners.types.errors import EngineError, StepError
from pengserve.replicas.engine.movers import exchange as exchange_module
from pengserve.replicas.engine.movers.restore import LayerRestore
from pengserve.replicas.engine.movers.weights_return import WeightsReturn
from pengserve.replicas.kv.placement import NO_ROW
from tests.replicas.engine.exchange_members import (
    FULL,
    LAYERS,
    NUM_BLOCKS,
    PLAIN,
    TIERED,
    Formed,
    Member,
    drop,
    grow,
    move_kv_of,
    num_dp_blocks,
    run,
    some_members,
    unused,
)
from tests.support.thread_exchange import ThreadExchange

pytestmark = pytest.mark.slow  # imports vLLM

NAMES = {"plain": PLAIN, "tiered": TIERED, "full": FULL}


def kinds(counts: Sequence[int] = (2, 4), names: Sequence[str] = tuple(NAMES)) -> list[Any]:
    return [pytest.param((count, NAMES[name]), id=f"{count}-{name}") for count in counts for name in names]


@pytest.fixture(params=kinds())
def members(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Member]]:
    """Members whose requests have blocks all over; two of the first member's share a block (a cached prefix)."""
    monkeypatch.setattr(exchange_module, "revive", lambda handoff, client: None)
    found = some_members(*request.param)
    yield found
    for member in found:
        member.close()


def require_all(members: Sequence[Member], formed: Formed) -> None:
    """Every member has its layers of all requests; each block has a place of its own."""
    for member in members:
        lane = member.lane
        assert member.layers.check(lane.layers, member.kind.sizes.num_blocks(lane.layers)) == ()
        assert member.check() == ()
        physical = lane.table.physical(lane.table.leased())
        assert len(set(physical)) == len(physical) == lane.capacity.num_blocks
        if lane.tiers is not None:
            assert not lane.tiers.kv.is_moving(np.array(physical)), "nothing is on its way any more"
            assert lane.tiers.rows.num_rows == member.kind.host_rows * lane.sizes.per_row, "it has all of the host"
        for traveller in formed.wave:
            assert member.has(traveller.request_id, traveller.logical_ids), (member.rank, traveller.request_id)
        assert member.has("new", formed.new, len(formed.new))


@pytest.mark.parametrize("seed", range(4))
def test_after_a_drop_every_member_has_its_layers_of_all_requests(members: list[Member], seed: int) -> None:
    require_all(members, drop(members, seed))


def test_a_shared_block_becomes_two(members: list[Member]) -> None:
    wave = drop(members).wave
    one, other = (next(t for t in wave if t.request_id == i).logical_ids[0] for i in ("r0.0", "r0.1"))
    for member in members:
        a, b = member.lane.table.physical([one, other])
        assert a != b


@pytest.mark.parametrize("members", kinds([4]), indirect=True)
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_in_a_pipeline_of_pipelines_every_member_has_its_layers_of_all_requests(
    members: list[Member], sizes: tuple[int, ...], seed: int
) -> None:
    require_all(members, formed := grow(members, sizes, seed))
    assert formed.new or members[0].kind is FULL, "new requests have room before any KV has come"


@pytest.mark.parametrize("members", kinds(names=["plain", "tiered"]), indirect=True)
def test_a_drop_makes_room_before_any_kv_has_come(members: list[Member]) -> None:
    assert drop(members).new


@pytest.mark.parametrize("members", kinds(names=["full"]), indirect=True)
def test_kv_comes_from_hosts_and_goes_to_them(members: list[Member]) -> None:
    """It is more than devices hold, before and after, and on hosts only as far as that."""
    before = [
        member.num_on_host(member.lanes.dp, [b for blocks in member.requests.values() for b in blocks])
        for member in members
    ]
    wave = drop(members).wave
    assert min(before) > 0
    after = []
    for member in members:
        blocks = [b for t in wave for b in member.lane.table.physical(t.logical_ids[:NUM_BLOCKS])]
        after.append(member.num_on_host(member.lane, blocks))
        assert after[-1] == num_beyond(member, member.lane.layers, blocks)
    assert max(after) > 0


def num_beyond(member: Member, layers: tuple[int, int], blocks: Sequence[int]) -> int:
    """Of so many blocks, those for which a device has no room in these layers."""
    return max(0, len(blocks) - (member.kind.sizes.num_blocks(layers) - 1))


@pytest.mark.parametrize("members", kinds(names=["tiered", "full"]), indirect=True)
def test_after_a_drop_every_block_that_the_lane_has_finds_a_place(members: list[Member]) -> None:
    formed = drop(members)
    rest = sorted({*unused(members, formed.wave), *(t.logical_ids[-1] for t in formed.wave)} - {*formed.new})
    for member in members:
        assert member.lane.tiers is not None
        blocks = member.lane.table.physical(rest)
        for i in range(0, len(blocks), 8):
            member.lane.tiers.kv.claim(np.array(blocks[i : i + 8]))
        member.write(member.lane, "rest", blocks)
        assert member.has("rest", rest, len(rest))
    require_all(members, formed)


def test_weights_come_back_and_what_is_in_use_keeps_its_kv(members: list[Member]) -> None:
    formed = drop(members)
    for member in members:
        move_kv_of(member, formed.wave, random.Random(member.rank))
    parts, kept = bring_back(members, formed, Parts(LAYERS, (1,) * len(members)))
    for member in members:
        assert sorted(member.filled) == [layer for layer in range(LAYERS) if layer not in range(*member.lane.layers)]
        assert all((member.layers.weights(layer) == layer + 1).all() for layer in range(LAYERS))
        assert member.layers.check_chunks() == member.check() == ()
        require_kept(member, formed, kept)
    for part, member in zip(parts, members, strict=True):
        part.undo()
        assert member.layers.check(member.lane.layers, member.kind.sizes.num_blocks(member.lane.layers)) == ()
        assert member.check() == ()
        require_kept(member, formed, kept)


def require_kept(member: Member, formed: Formed, kept: list[int]) -> None:
    assert all(member.has(t.request_id, t.logical_ids) for t in formed.wave)
    assert member.has("new", kept, len(kept))


def bring_back(members: list[Member], formed: Formed, parts: Parts) -> tuple[list[Any], list[int]]:
    """The weights of these parts; who brought them, and which of the blocks of new requests hold KV still."""
    sizes, lane = members[0].kind.sizes, members[0].lane
    count = lane.sizes.smallest - sizes.num_blocks_left(parts)
    free = [*reversed(formed.new), *reversed([i for i in unused(members, formed.wave) if i not in formed.new])]
    withheld = free[-count:]
    returns = [WeightsReturn(m.lanes, m.lane, parts) for m in members]
    for returning, member in zip(returns, members, strict=True):
        if (tiers := member.lane.tiers) is None:
            returning.begin(withheld)
            continue
        gone = np.array(member.lane.table.physical(withheld), dtype=np.int64)
        for some in np.array_split(gone, 1 + len(gone) // 8):
            tiers.kv.claim(some)  # cached prefixes, which go with their blocks
        returning.begin(withheld)
        assert not tiers.kv.placement.index[:, gone].any() and (tiers.kv.placement.row[gone] == NO_ROW).all()
    assert run(members, returns, seed=3) == list(range(len(members)))
    num_kept = next((i for i, block in enumerate(formed.new) if block in withheld), len(formed.new))
    return returns, formed.new[:num_kept]


RESTORES = [
    pytest.param((sum(sizes), kind), sizes, id=f"{name}-{sizes}")
    for sizes in ((1, 1), (1, 1, 1, 1), (2, 2), (1, 1, 2))
    for name, kind in NAMES.items()
]


@pytest.mark.parametrize(("members", "sizes"), RESTORES, indirect=["members"])
def test_after_a_restore_every_member_has_what_its_part_needs(members: list[Member], sizes: tuple[int, ...]) -> None:
    formed, parts = drop(members), Parts(LAYERS, sizes)
    bring_back(members, formed, parts)
    for member in members:
        move_kv_of(member, formed.wave, random.Random(member.rank))
    wave, going_on = formed.wave, [narrower_of(member, parts) for member in members]
    blocks = [handed_out(members[0], going_on[parts.start(part)], size) for part, size in enumerate(sizes)]
    for index, traveller in enumerate(wave):
        part = index % len(sizes)
        traveller.rank, traveller.part_ids = parts.start(part), [next(blocks[part]) for _ in range(NUM_BLOCKS + 1)]
    for member in members:
        if member.lane.tiers is not None:
            logical = [b for t in wave for b in t.logical_ids[:NUM_BLOCKS]]
            member.lane.tiers.gather(np.array(member.lane.table.physical(logical)))
            assert member.check() == ()
    group = ThreadExchange()
    with ThreadPoolExecutor(len(members)) as pool:
        restores = [
            LayerRestore(m.lanes, m.lane, parts, group.communicator(m.rank), narrower)
            for m, narrower in zip(members, going_on, strict=True)
        ]
        list(pool.map(lambda restore: restore.run(wave), restores))
    for member, narrower in zip(members, going_on, strict=True):
        enter(member, narrower)
        layers = parts.layers(member.rank)
        assert member.layers.check(layers, member.kind.sizes.num_blocks(layers)) == member.check() == ()
        assert all((member.layers.weights(layer) == layer + 1).all() for layer in range(*layers))
        mine = [t for t in wave if parts.of(t.rank) == parts.of(member.rank)]
        lane = narrower or member.lanes.dp
        assert mine and all(member.holds(lane, t.request_id, t.part_ids[:NUM_BLOCKS]) for t in mine)
        if member.tiers is not None:
            blocks = [b for t in mine for b in t.part_ids[:NUM_BLOCKS]]
            assert member.num_on_host(lane, blocks) == num_beyond(member, layers, blocks)


def narrower_of(member: Member, parts: Parts) -> Any:
    """The pipeline in which a member goes on; None: alone."""
    part = parts.of(member.rank)
    size = parts.sizes[part]
    return member.new_lane(member.rank - parts.start(part), size) if size > 1 else None


def handed_out(member: Member, narrower: Any, size: int) -> Iterator[int]:
    """What a part's scheduler hands out: the last blocks first, which the device does not have at home."""
    if size > 1:
        stages = stage_layers(LAYERS, size)
        plain = member.kind.sizes.num_pipeline_blocks(stages)
        return iter(range(narrower.capacity.num_blocks if member.kind.host_rows else plain, 0, -1))
    return iter(range(num_dp_blocks(member.kind) - 1, 0, -1))


def enter(member: Member, narrower: Any) -> None:
    """The pipeline ends, and the member goes on."""
    member.lane.give_up_host()
    if narrower is not None:
        every = range(1, narrower.capacity.num_blocks + 1)
        narrower.table.lease(every, every)
        if narrower.tiers is not None:
            narrower.tiers.all_came()
        member.lane = narrower
    elif member.tiers is not None:
        member.layers.mirror()


@pytest.mark.parametrize("members", kinds(names=["plain"]), indirect=True)
def test_weights_without_room_are_refused_and_nothing_has_changed(members: list[Member]) -> None:
    drop(members)
    member = max(members, key=lambda m: m.lane.layers[1] - m.lane.layers[0])
    before = member.lane.table.physical(member.lane.table.leased())
    with pytest.raises(StepError, match="have no room"):
        WeightsReturn(member.lanes, member.lane, Parts(LAYERS, (1,) * len(members))).begin([])
    assert member.lane.table.physical(member.lane.table.leased()) == before


def test_weights_in_another_order_are_refused(members: list[Member]) -> None:
    formed = drop(members)
    members[0].lanes.dp.memory.weight_order = 1
    with pytest.raises(EngineError, match="packs weights in another way"):
        bring_back(members, formed, Parts(LAYERS, (1,) * len(members)))
