"""Laws of the device tier: it has memory for what was reserved, keeps bytes, and loses nothing that is in flight."""

from collections.abc import Iterator

import pytest
import torch

from pengserve.planners.types.errors import StepError
from pengserve.replicas.kv.ledger import Cells
from pengserve.replicas.kv.tiers import KvTier
from tests.replicas.kv.room import BLOCK, LAYERS, SIZES, Room


@pytest.fixture
def room() -> Iterator[Room]:
    made = Room()
    made.fill()
    yield made
    made.close()


def tail(room: Room, layer: int, keep: int) -> Cells:
    return Cells((layer, layer + 1), range(keep, room.memory.num_blocks(layer)))


def test_memory_moves_between_layers_and_bytes_stay(room: Room) -> None:
    tier: KvTier = room.tier
    base = room.memory.base_blocks
    before = room.bytes()
    grown = Cells((1, 2), [base + 8, base])
    assert tier.holds(Cells((0, LAYERS), range(base))) and not tier.holds(grown)
    with pytest.raises(StepError):
        tier.reserve(grown)
    tier.release(tail(room, 0, 0))
    tier.reserve(grown)
    assert tier.holds(grown) and not tier.holds(Cells((0, 2), [1]))
    data = torch.randint(0, 255, (2, BLOCK), dtype=torch.uint8)
    tier.write(grown, data)
    assert torch.equal(tier.read(grown), data)
    assert torch.equal(room.bytes()[1][:base], before[1]) and torch.equal(room.bytes()[2], before[2])
    tier.release(tail(room, 1, base))
    tier.reserve(Cells((0, 1), range(base)))
    assert room.memory.is_whole() and room.memory.check_chunks() == ()


def test_a_reservation_that_fails_changes_nothing(room: Room) -> None:
    room.tier.release(tail(room, 0, room.memory.base_blocks - 6))  # room for one layer, and not for two
    before = [room.memory.num_blocks(layer) for layer in range(LAYERS)]
    with pytest.raises(StepError):
        room.tier.reserve(Cells((1, 3), [room.memory.base_blocks + 4]))
    assert [room.memory.num_blocks(layer) for layer in range(LAYERS)] == before
    assert room.memory.check_chunks() == ()


@pytest.mark.parametrize("writes", [True, False])
def test_what_is_in_flight_keeps_its_memory_whoever_wants_it(room: Room, writes: bool) -> None:
    cells = Cells((1, 2), [5])
    room.ledger.begin_copy(cells, writes=writes)
    with pytest.raises(ValueError, match="layer 1 is in flight"):
        room.tier.release(tail(room, 1, 5))
    with pytest.raises(ValueError, match="layer 1 is in flight"):
        room.memory.resize_kv(1, 0)
    assert room.memory.num_blocks(1) == room.memory.base_blocks
    room.tier.release(tail(room, 1, 6))
    room.tier.release(tail(room, 0, 0))
    room.ledger.end_copy(cells, writes=writes)
    room.tier.release(tail(room, 1, 0))
    assert room.memory.num_blocks(1) == 0 and room.memory.check_chunks() == ()


def test_only_the_last_blocks_of_a_layer_can_go(room: Room) -> None:
    with pytest.raises(ValueError, match="only the last"):
        room.tier.release(Cells((0, 1), [2, 3]))
    room.tier.release(Cells((0, 1), []))
    assert room.memory.is_whole() and room.tier.block_bytes == SIZES.block_bytes
