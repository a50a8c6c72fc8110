"""Laws of the mover: bytes come whole in any order, nothing in flight is reused, what is cancelled was never there."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.kv import pacing
from pengserve.replicas.kv.ledger import Cells
from pengserve.replicas.kv.rows import WeightRows
from pengserve.replicas.kv.transfer import Segment
from tests.replicas.kv.room import BLOCK, LANE, LAYERS, Room, content, deliver_to, hear_at_random
from tests.support.effort import examples

REUSED = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Room]]:
    """Three members, whose pieces are of one or two blocks."""
    monkeypatch.setattr(pacing, "LEAST_BYTES", BLOCK)
    monkeypatch.setattr(pacing, "MOST_BYTES", 2 * BLOCK)
    made = [Room(rank) for rank in range(3)]
    yield made
    for room in made:
        room.close()


Flow = tuple[int, int, int, list[int], list[int]]
"""From a rank to another (or to itself): blocks of a layer, and where they go."""


def random_flows(source: random.Random, num_blocks: int) -> list[Flow]:
    """Some between all pairs and within members. Blocks that one member reads and gets are different ones."""
    flows: list[Flow] = []
    pools = {
        (r, layer): source.sample(range(1, num_blocks), num_blocks - 1) for r in range(3) for layer in range(LAYERS)
    }
    for src in range(3):
        for dst in range(3):
            for layer in source.sample(range(LAYERS), source.randrange(LAYERS)):
                count = source.randrange(1, 4)
                sources, targets = pools[src, layer][:count], pools[dst, layer][-count:]
                del pools[src, layer][:count], pools[dst, layer][-count:]
                sources[-1] = sources[0]  # a block that is read twice
                flows.append((src, dst, layer, sources, targets))
    source.shuffle(flows)
    return flows


def submit(rooms: list[Room], flows: list[Flow], done: list[int], heard: list[tuple[int, str, int]]) -> None:
    for room in rooms:
        rank = room.rank
        plan = room.plan(
            [Segment(dst, layer, room.rows(layer, ids), round=layer) for s, dst, layer, ids, _ in flows if s == rank],
            [Segment(src, layer, room.rows(layer, ids)) for src, d, layer, _, ids in flows if d == rank],
            on_sent=lambda layer, rank=rank: heard.append((rank, "sent", layer)),
            on_layer=lambda layer, rank=rank: heard.append((rank, "came", layer)),
            on_done=lambda rank=rank: done.append(rank),
        )
        room.transfer = room.transfers.submit(plan, deliver_to(rooms, rank))


def require_content(rooms: list[Room], flows: list[Flow], seed: int) -> None:
    """What was to move has moved, and nothing else has changed."""
    targets = {(d, layer, t): (s, b) for s, d, layer, sources, ts in flows for t, b in zip(ts, sources, strict=True)}
    for room in rooms:
        for layer in range(LAYERS):
            for block in range(room.memory.num_blocks(layer)):
                origin = targets.get((room.rank, layer, block), (room.rank, block))
                assert (room.memory.kv(layer)[block] == content(origin[0], layer, origin[1], seed)).all()


@given(st.integers(0, 10**6))
@settings(max_examples=examples(120), suppress_health_check=REUSED)
def test_all_bytes_are_where_they_belong_in_whatever_order_pieces_come(rooms: list[Room], seed: int) -> None:
    source, done, heard = random.Random(seed), [], []
    for room in rooms:
        room.fill(seed % 7)
    flows = random_flows(source, rooms[0].memory.base_blocks)
    submit(rooms, flows, done, heard)
    assert sum(room.ledger.num_in_flight for room in rooms) == 2 * sum(len(ids) for *_, ids in flows)
    hear_at_random(rooms, source)
    for rank in range(3):
        layers = [layer for teller, what, layer in heard if (teller, what) == (rank, "sent")]
        assert layers == sorted(layers), "rounds go one after the other"
    assert sorted(done) == [0, 1, 2] and all(room.ledger.num_in_flight == 0 for room in rooms)
    sent = {(s, "sent", layer) for s, _, layer, _, _ in flows}
    came = {(d, "came", layer) for _, d, layer, _, _ in flows}
    assert sorted(heard) == sorted(sent | came), "each is told once"
    require_content(rooms, flows, seed % 7)


@given(st.integers(0, 10**6))
@settings(max_examples=examples(60), suppress_health_check=REUSED)
def test_a_cancelled_transfer_leaves_all_as_it_was_but_the_cells_it_wrote(rooms: list[Room], seed: int) -> None:
    source, done = random.Random(seed), []
    for room in rooms:
        room.fill()
    flows = random_flows(source, rooms[0].memory.base_blocks)
    submit(rooms, flows, done, [])
    for _ in range(source.randrange(8)):
        room = source.choice(rooms)
        if room.inbox and source.random() < 0.5:
            room.transfer.receive(*room.inbox.pop(0))
        else:
            room.transfers.advance(1e-4)
    ended = {*done}
    for room in rooms:
        room.transfers.cancel(room.transfer)
        room.transfers.cancel(room.transfer)
        room.transfers.cancel_of(LANE)
        room.require_laws()
        assert room.ledger.num_in_flight == 0 and not room.transfers.is_busy
        written = {(layer, t) for _, d, layer, _, ts in flows if d == room.rank for t in ts}
        for layer, kv in enumerate(room.bytes()):
            for block in range(room.memory.base_blocks):
                if (layer, block) not in written:
                    assert (kv[block] == content(room.rank, layer, block)).all()
        if room.rank not in ended:
            for message in room.inbox:
                with pytest.raises(EngineError, match="does not belong here"):
                    room.transfer.receive(*message)
        room.inbox.clear()
    assert {*done} == ended, "a cancelled transfer tells nothing"
    done.clear()
    submit(rooms, flows, done, [])
    hear_at_random(rooms, source)
    assert sorted(done) == [0, 1, 2]
    require_content(rooms, flows, 0)


def test_bytes_that_come_before_there_is_memory_wait_and_lose_nothing(rooms: list[Room]) -> None:
    source, (one, other, _) = random.Random(1), rooms
    one.fill()
    base, done = one.memory.base_blocks, []
    targets = [base + 2, 3, base, 5]
    plan = one.plan([Segment(1, 0, one.rows(0, [4, 9, 1, 2]))])
    one.transfers.submit(plan, deliver_to(rooms, 0))
    plan = other.plan([], [Segment(0, 0, other.rows(0, targets))], on_done=lambda: done.append(1))
    other.transfer = other.transfers.submit(plan, deliver_to(rooms, 1))
    hear_at_random(rooms, source)
    assert not done and other.transfer.waiting_layers() == [0] and not other.transfers.wait_layer(0)
    other.memory.resize_kv(2, 0)
    other.memory.resize_kv(0, base + 3)
    other.transfer.settle()
    assert done == [1] and other.transfers.wait_layer(0)
    for target, block in zip(targets, [4, 9, 1, 2], strict=True):
        assert (other.memory.kv(0)[target] == content(0, 0, block)).all()


def test_another_copy_may_read_what_is_read_and_touch_nothing_that_is_written(rooms: list[Room]) -> None:
    room = rooms[0]
    room.fill()
    first = room.transfers.submit(room.plan(*room.copy(0, [1, 2], [3, 4])), deliver_to(rooms, 0))
    before = room.ledger.num_in_flight
    for sources, targets in [([3], [9]), ([9], [4]), ([9], [1])]:
        with pytest.raises(ValueError, match=r"in flight|being written"):
            room.transfers.submit(room.plan(*room.copy(0, sources, targets)), deliver_to(rooms, 0))
        assert room.ledger.num_in_flight == before and room.transfers.conflicts(Cells((0, 1), [9])) == []
    assert room.transfers.conflicts(Cells((0, 1), range(20))) == [1, 2, 3, 4]
    assert room.transfers.conflicts(Cells((1, LAYERS), range(20))) == [], "other layers of these blocks are still"
    room.transfers.submit(room.plan(*room.copy(0, [1], [7])), deliver_to(rooms, 0))
    while room.transfers.is_busy:
        room.transfers.advance(1.0)
    assert first.is_done and [int(room.memory.kv(0)[block][0]) for block in (3, 4, 7)] == [
        content(0, 0, block) for block in (1, 2, 1)
    ]


def test_a_layer_that_is_waited_for_goes_before_others_of_this_member(rooms: list[Room]) -> None:
    room = rooms[0]
    room.fill()
    outgoing, incoming = [], []
    for layer in range(LAYERS):
        out, into = room.copy(layer, [1, 2, 3, 4, 5], [11, 12, 13, 14, 15])
        outgoing += out
        incoming += into
    incoming.append(Segment(1, 1, room.rows(1, [20])))
    transfer = room.transfers.submit(room.plan(outgoing, incoming), deliver_to(rooms, 0))
    room.transfers.advance(1e-9)
    assert room.transfers.wait_layer(2)
    assert [int(room.memory.kv(2)[block][0]) for block in range(11, 16)] == [content(0, 2, b) for b in range(1, 6)]
    assert not room.transfers.wait_layer(1), "rank 1 has not sent its part"
    assert not transfer.is_done and not transfer.awaits(2) and transfer.awaits(0)
    room.require_laws()
    room.transfers.wait_layer(0)
    transfer.receive(1, [b"1 0 0", bytearray(BLOCK)])
    room.transfers.advance(1.0)
    assert transfer.is_done and room.ledger.num_in_flight == 0


@pytest.mark.parametrize(
    ("peer", "header", "num_bytes"),
    [
        (2, b"0 0 0", BLOCK),  # from a rank that sends none
        (1, b"1 0 0", BLOCK),  # of another layer
        (1, b"0 1 0", 2 * BLOCK),  # beyond the last row
        (1, b"0 -1 0", BLOCK),
        (1, b"0 0 0", BLOCK + 1),
        (1, b"0 0 0", 0),
        (1, b"0 0", BLOCK),
        (1, b"0 x 0", BLOCK),
    ],
)
def test_a_piece_that_is_not_due_is_refused_and_changes_nothing(
    rooms: list[Room], peer: int, header: bytes, num_bytes: int
) -> None:
    room = rooms[0]
    room.fill()
    before = room.bytes()
    plan = room.plan([], [Segment(1, 0, room.rows(0, [5, 6]))])
    transfer = room.transfers.submit(plan, deliver_to(rooms, 0))
    with pytest.raises(EngineError, match=r"does not belong here|header that is none"):
        transfer.receive(peer, [header, bytearray(num_bytes)])
    assert all(map(torch.equal, room.bytes(), before)) and room.ledger.num_in_flight == 2
    transfer.receive(1, [b"0 1 0", bytearray(BLOCK)])
    with pytest.raises(EngineError, match="does not belong here"):
        transfer.receive(1, [b"0 0 0", bytearray(2 * BLOCK)])  # more than is due
    transfer.receive(1, [b"0 0 0", bytearray(BLOCK)])
    assert room.ledger.num_in_flight == 0
    with pytest.raises(EngineError, match="does not belong here"):
        transfer.receive(1, [b"0 0 0", bytearray(BLOCK)])
    room.require_laws()


def test_bytes_in_another_order_are_refused(rooms: list[Room]) -> None:
    room = rooms[0]
    plan = room.plan([], [Segment(1, 0, WeightRows(room.memory, 0, form=3))])
    transfer = room.transfers.submit(plan, deliver_to(rooms, 0))
    with pytest.raises(EngineError, match="in another way"):
        transfer.receive(1, [b"0 0 4", bytearray(10)])


def test_a_message_of_other_parts_and_a_plan_of_two_equal_names_are_refused(rooms: list[Room]) -> None:
    room = rooms[0]
    segment = Segment(1, 0, room.rows(0, [5]))
    with pytest.raises(ValueError, match="two segments of KV"):
        room.transfers.submit(room.plan([], [segment, Segment(1, 0, room.rows(0, [6]))]), deliver_to(rooms, 0))
    transfer = room.transfers.submit(room.plan([], [segment]), deliver_to(rooms, 0))
    for parts in ([], [b"0 0 0"], [b"0 0 0", bytearray(BLOCK), b""]):
        with pytest.raises(ValueError, match="unpack"):
            transfer.receive(1, parts)
    assert room.ledger.num_in_flight == 1


@pytest.mark.parametrize("has_handler", [True, False])
def test_a_peer_that_is_gone_ends_its_transfer_alone(rooms: list[Room], has_handler: bool) -> None:
    room, told = rooms[0], []
    room.fill()

    def send(rank: int, parts: Any) -> None:
        raise EngineError("instance 1.0 is gone")

    lost: Any = deliver_to(rooms, 0)
    lost._send = send
    plan = room.plan([Segment(1, 0, room.rows(0, [1]))], on_failed=told.append if has_handler else None)
    room.transfers.submit(plan, lost)
    good = room.transfers.submit(room.plan(*room.copy(1, [1], [2])), deliver_to(rooms, 0))
    if has_handler:
        room.transfers.advance(0.0)
        assert [str(error) for error in told] == ["instance 1.0 is gone"]
    else:
        with pytest.raises(EngineError, match="is gone"):
            room.transfers.advance(1.0)
    room.require_laws()
    assert room.ledger.num_in_flight == 2 and room.transfers.is_busy
    room.transfers.advance(1.0)
    assert good.is_done and not room.transfers.is_busy


@pytest.mark.parametrize(("budget_s", "num_sent"), [(0.0, 1), (3600.0, 3)])
def test_small_transfers_leave_together_while_there_is_time(rooms: list[Room], budget_s: float, num_sent: int) -> None:
    room = rooms[0]
    room.fill()
    small = [room.transfers.submit(room.plan(*room.copy(1, [i], [i + 3])), deliver_to(rooms, 0)) for i in (1, 2, 3)]
    room.transfers.advance(budget_s)
    assert [transfer.is_done for transfer in small] == [i < num_sent for i in range(3)]


def test_a_piece_takes_about_the_time_it_may() -> None:
    pace = pacing.Pace()
    assert pace.num_bytes == pacing.LEAST_BYTES
    pace.took(1 << 20, seconds=0.5, budget_s=2.0)
    assert pace.num_bytes == 4 << 20
    pace.took(4 << 20, seconds=0.0, budget_s=2.0)
    assert pace.num_bytes == 16 << 20
    pace.took(60 << 20, seconds=0.0, budget_s=2.0)
    assert pace.num_bytes == pacing.MOST_BYTES
    pace.took(4 << 20, seconds=9.0, budget_s=1e-6)
    assert pace.num_bytes == pacing.LEAST_BYTES
