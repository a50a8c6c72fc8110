"""Laws of KV on two tiers: what a step reads is what was written, and every cell and row has one owner."""

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.kv.copies import Copy, Priority
from pengserve.replicas.kv.placement import NO_ROW
from tests.replicas.kv.tiered_world import BLOCK_SIZE, TieredWorld


@given(
    seed=st.integers(0, 10_000),
    num_layers=st.integers(2, 6),
    device_blocks=st.integers(5, 14),
    host_blocks=st.integers(1, 40),
)
@example(seed=2, num_layers=2, device_blocks=9, host_blocks=4)  # a step came while copies of others held what it needed
def test_a_step_reads_what_was_written(seed: int, num_layers: int, device_blocks: int, host_blocks: int) -> None:
    rng = random.Random(seed)
    reserved = min(device_blocks - 1, 1 + rng.choice([2, 10, 20]) // num_layers)
    world = TieredWorld(num_layers, device_blocks, host_blocks, reserved, rng.choice([0.0, 1e9, 5e7]))
    try:
        for _ in range(30):
            world.random_step(rng)
    finally:
        world.close()


def test_blocks_at_home_take_no_table() -> None:
    world = TieredWorld(4, 16, 16, 2)
    request = world.begin()
    for _ in range(3 * BLOCK_SIZE):
        world.step([(request, 1)])
    assert world.tiers.counts.mapped_steps == 0
    world.close()


@given(seed=st.integers(0, 10_000), device_blocks=st.integers(8, 14), host_blocks=st.integers(8, 40))
def test_requests_that_decode_on_read_what_was_written_while_others_move(
    seed: int, device_blocks: int, host_blocks: int
) -> None:
    """The table of blocks is written again only where something has changed, and then it is."""
    rng = random.Random(seed)
    world = TieredWorld(rng.choice([2, 4]), device_blocks, host_blocks, min(device_blocks - 1, 6))
    try:
        for _ in range(6):
            world.random_step(rng)
            work = []
            for request in world.requests:
                if world.can_step([*work, (request, BLOCK_SIZE)]):
                    work.append((request, BLOCK_SIZE))
            for _ in range(rng.randint(1, 2 * BLOCK_SIZE)):
                if not work or not world.can_step([(request, 1) for request, _ in work]):
                    break
                world.step([(request, 1) for request, _ in work])
                if rng.random() < 0.2:
                    world.move_one(rng)
    finally:
        world.close()


def test_steps_in_which_nothing_has_changed_look_at_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """At home, and where blocks have other places than their own, in one table for all layers."""
    world = TieredWorld(4, 16, 40, 2)
    for _ in range(4):  # the last of them has blocks that no device has
        for other in world.requests[:-1]:
            world.end(other)
        request = world.begin()
        world.step([(request, 11 * BLOCK_SIZE)])
    looked: list[int] = []
    begin = world.tiers.begin_step
    monkeypatch.setattr(world.tiers, "begin_step", lambda *given: looked.append(1) or begin(*given))
    mapped = world.tiers.counts.mapped_steps
    for _ in range(3 * BLOCK_SIZE):
        world.step([(request, 1)])
    assert world.tiers.counts.mapped_steps == mapped + 3 * BLOCK_SIZE, "blocks have other places"
    assert len(looked) <= 2, "the first step, and at most one that makes room"
    world.close()


def test_steps_whose_layers_have_tables_of_their_own_look_at_no_block_either(monkeypatch: pytest.MonkeyPatch) -> None:
    world = TieredWorld(4, 20, 20, 2)
    request = world.begin()
    world.step([(request, 4 * BLOCK_SIZE)])
    placement, block = world.tiers.placement, np.array(request.blocks[1:2])
    before, elsewhere = placement.cells(1, block), placement.take(1)
    world.pool.cells[elsewhere] = world.pool.cells[before]
    placement.drop(1, block)
    placement.put(1, block, elsewhere)
    looked: list[int] = []
    begin = world.tiers.begin_step
    monkeypatch.setattr(world.tiers, "begin_step", lambda *given: looked.append(1) or begin(*given))
    for _ in range(3 * BLOCK_SIZE):
        world.step([(request, 1)])
        assert world.shown.step is not None and world.shown.step.is_layered
    assert len(looked) == 1, "blocks that begin are shown without a look at the others"
    world.close()


def test_blocks_that_come_back_have_one_index_in_all_layers_where_one_is_free() -> None:
    """Else each step that reads them would need a table a layer."""
    world = TieredWorld(4, 20, 20, 2)
    request = world.begin()
    world.step([(request, 6 * BLOCK_SIZE)])
    blocks, none = np.array(request.blocks), np.zeros(0, dtype=np.int64)
    placement = world.tiers.placement
    world.tiers.room.make_room(world.pool.num_cells, none)
    taken = placement.take(3)  # of one layer's own cells
    assert world.tiers.bring(blocks, none)
    world.tiers.traffic.wait(world.tiers.traffic.copies())
    assert placement.is_uniform[blocks].all()
    num_columns = len(placement.free_columns())
    single = placement.take(3)
    assert len(placement.free_columns()) == num_columns, "others take what is left of them"
    placement.give(np.concatenate([taken, single]))
    world.step([(request, 1)])
    world.close()


def test_a_block_that_moves_between_two_steps_is_looked_at_anew() -> None:
    world = TieredWorld(4, 20, 20, 2)
    request = world.begin()
    world.step([(request, 4 * BLOCK_SIZE + 1)])
    blocks = np.array(request.blocks[:4])
    world.tiers.write_behind(blocks)
    world.tiers.traffic.wait(world.tiers.traffic.copies())
    world.step([(request, 1)])
    world.tiers.place(blocks, [1])
    world.step([(request, 1)])
    assert world.tiers.counts.staged == 4, "they left the device at once: the host had them"
    world.close()


def test_a_prompt_of_thrice_what_the_device_holds_in_a_layer() -> None:
    world = TieredWorld(12, 8, 40, 4)
    request = world.begin()
    while len(request.blocks) < 24:
        world.step([(request, 2 * BLOCK_SIZE)])
    for _ in range(2 * BLOCK_SIZE):
        world.step([(request, 1)])
    assert world.tiers.counts.staged > 0
    world.close()


def test_a_second_swap_out_copies_only_what_is_new() -> None:
    world = TieredWorld(4, 10, 40, 2)
    first, second = world.begin(), world.begin()
    world.step([(first, 6 * BLOCK_SIZE)])
    world.step([(second, 6 * BLOCK_SIZE)])
    moved = dict(world.tiers.engine.moved_bytes)
    for _ in range(3):
        world.step([(first, 1)])
        world.step([(second, 1)])
    counts = world.tiers.counts
    assert counts.reused > counts.evicted // 2
    assert sum(world.tiers.engine.moved_bytes.values()) > sum(moved.values())
    world.close()


def test_prefixes_that_leave_next_are_saved_beside_the_steps() -> None:
    """A step that makes room waits for the copies of what leaves; those of what leaves after that have been made."""
    world = TieredWorld(4, 32, 80, 2)
    for _ in range(6):  # a prefix each, of 12 of the device's 31 blocks; every third ends without one
        request = world.begin()
        world.step([(request, 12 * BLOCK_SIZE)])
        world.end(request)
    moved = world.tiers.engine.moved_bytes
    assert moved[True, Priority.BEHIND] > 0, "they are saved before their room is needed"
    world.tiers.traffic.wait(world.tiers.traffic.copies())
    saved = int(world.tiers.placement.on_host[:, list(world.cached)].all(axis=0).sum())
    away = int((world.tiers.placement.index[:, list(world.cached)] == 0).all(axis=0).sum())
    assert saved > away
    world.close()


def test_a_step_that_the_device_cannot_hold_is_refused_in_a_sentence() -> None:
    world = TieredWorld(2, 6, 40, 1)
    request = world.begin()
    with pytest.raises(EngineError, match="a step needs KV of 9 blocks"):
        world.step([(request, 9 * BLOCK_SIZE)])
    world.close()


def test_what_is_written_on_goes_stale_on_the_host() -> None:
    world = TieredWorld(3, 10, 10, 2)
    request = world.begin()
    world.step([(request, BLOCK_SIZE + 1)])
    blocks = np.array(request.blocks)
    world.tiers.write_behind(blocks)
    world.step([(request, 1)])
    assert world.tiers.placement.row[blocks[1]] == NO_ROW
    assert world.tiers.placement.on_host[:, blocks[0]].all()
    world.close()


def test_layers_that_are_placed_on_the_host_stay_there_and_are_staged() -> None:
    world = TieredWorld(4, 20, 20, 2)
    request = world.begin()
    world.step([(request, 4 * BLOCK_SIZE)])
    blocks = np.array(request.blocks)
    world.tiers.place(blocks, [1, 3])
    world.tiers.traffic.wait(world.tiers.traffic.copies())
    for _ in range(3):
        world.step([(request, 1)])
        away = (world.tiers.placement.index[:, blocks] == 0).sum(axis=1)
        assert away.tolist() == [0, 4, 0, 4]
    assert world.tiers.counts.staged == 3 * 8
    world.tiers.place(blocks, [])
    world.step([(request, 1)])
    assert world.tiers.num_away(blocks) == 0, "they are kept where they were staged"
    world.close()


def test_a_request_that_comes_back_keeps_its_layers_on_the_host() -> None:
    world = TieredWorld(4, 20, 20, 2)
    request = world.begin()
    world.step([(request, 4 * BLOCK_SIZE)])
    blocks, none = np.array(request.blocks), np.zeros(0, dtype=np.int64)
    world.tiers.place(blocks, [0, 2])
    world.tiers.traffic.wait(world.tiers.traffic.copies())
    assert not world.tiers.bring(blocks, none), "nothing is to come"
    world.tiers.room.make_room(world.pool.num_cells, none)
    assert world.tiers.num_away(blocks) == 4 * 4
    assert world.tiers.bring(blocks, none)
    world.tiers.traffic.wait(world.tiers.traffic.copies())
    assert (world.tiers.placement.index[:, blocks] == 0).sum(axis=1).tolist() == [4, 0, 4, 0]
    world.step([(request, 1)])
    world.close()


def test_copies_that_ended_unseen_mean_nothing_to_the_tables_after_the_host_is_given_up() -> None:
    """One fails on the copying thread between two looks, and takes all that wait behind it along."""
    world = TieredWorld(4, 16, 16, 2)
    request = world.begin()
    world.step([(request, 8 * BLOCK_SIZE)])
    engine, blocks = world.tiers.engine, np.array(request.blocks[:4])
    world.tiers.placement.take_rows(blocks)
    engine._move_piece = _fail  # type: ignore[method-assign]
    world.tiers.room.save([blocks] * world.num_layers, Priority.EVICT, wait=False)
    assert not world.tiers.traffic.check()
    for copy in world.tiers.traffic.copies():
        engine.wait(copy)
    assert engine.has_news and world.tiers.failure
    world.tiers.give_up()
    world.tiers.settle()
    assert world.tiers.host.num_rows == 0 and not world.tiers.traffic.in_flight.any()
    world.close()


def _fail(copy: Copy) -> None:
    raise OSError("a fault of the test")
