"""Law: the same plan brings the same bytes over each end of a channel: peer messages, ways, own TCP, and gloo."""

import contextlib
import queue
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.comm import bulk
from pengserve.replicas.comm.bulk import Landed
from pengserve.replicas.kv.channel import BulkChannel, CommunicatorChannel, PeerChannel, read_header
from pengserve.replicas.kv.transfer import Segment, TransferPlan
from tests.replicas.comm.fake_nccl import nccl_is_there
from tests.replicas.comm.local import LocalCluster
from tests.replicas.kv.room import BLOCK, LAYERS, Room, content

SIZE = 3


@pytest.fixture
def rooms() -> Iterator[list[Room]]:
    made = [Room(rank) for rank in range(SIZE)]
    for room in made:
        room.fill()
    yield made
    for room in made:
        room.close()


def ring(room: Room, num_rounds: int) -> TransferPlan:
    """Each member sends each layer to all members, a layer or several in a round; block b comes to 10 * (rank + 1) + b.

    The orders in which plans name segments differ from member to member.
    """
    blocks, pairs = [1, 5, 2], [(rank, layer) for rank in range(SIZE) for layer in range(LAYERS)]
    outgoing = [Segment(rank, layer, room.rows(layer, blocks), round=layer % num_rounds) for rank, layer in pairs]
    incoming = [
        Segment(rank, layer, room.rows(layer, [10 * (rank + 1) + block for block in blocks]), round=layer % num_rounds)
        for rank, layer in pairs
    ]
    chance = random.Random(room.rank)
    chance.shuffle(outgoing)
    chance.shuffle(incoming)
    return room.plan(outgoing, incoming)


def require_ring(rooms: list[Room]) -> None:
    for room in rooms:
        for layer in range(LAYERS):
            for rank in range(SIZE):
                for block in (1, 5, 2):
                    found = room.memory.kv(layer)[10 * (rank + 1) + block]
                    assert (found == content(rank, layer, block)).all(), (room.rank, layer, rank, block)
        assert room.ledger.num_in_flight == 0 and not room.transfers.is_busy
        room.require_laws()


@pytest.mark.parametrize("num_rounds", [1, 2, LAYERS])
@pytest.mark.parametrize("backend", ["direct", "gloo"])
def test_over_a_communicator_all_members_move_at_once(rooms: list[Room], backend: str, num_rounds: int) -> None:
    cluster = LocalCluster(SIZE, timeout_s=20.0, backend=backend)
    try:
        group = cluster.group(*range(SIZE))

        def run(rank: int) -> bool:
            room = rooms[rank]
            transfer = room.transfers.submit(ring(room, num_rounds), CommunicatorChannel(group[rank], rank))
            room.transfers.run(transfer)
            return transfer.is_done

        assert cluster.on(group, lambda communicator: run(communicator.rank)) == [True] * SIZE
        require_ring(rooms)
        group[1].abort()
        room = rooms[1]
        with pytest.raises(EngineError):
            room.transfers.run(room.transfers.submit(ring(room, num_rounds), CommunicatorChannel(group[1], 1)))
        assert room.ledger.num_in_flight == 0 and not room.transfers.is_busy
        room.require_laws()
    finally:
        cluster.close()


def test_over_peer_messages_a_piece_at_a_time(rooms: list[Room]) -> None:
    cluster = LocalCluster(SIZE, timeout_s=20.0)
    try:
        keys = [member.network.key for member in cluster.members]
        for room, member in zip(rooms, cluster.members, strict=True):
            # Before the peers' messages come; a test's member hears no other kind.
            member.network.subscribe(
                "kv", lambda key, _, parts, room=room: room.inbox.append((keys.index(key), list(parts)))
            )
        for room, member in zip(rooms, cluster.members, strict=True):
            send = lambda rank, parts, member=member: member.network.send(keys[rank], "kv", parts)  # noqa: E731
            room.transfer = room.transfers.submit(ring(room, LAYERS), PeerChannel(send))
        ends_s = time.monotonic() + 60.0
        while not all(room.transfer is not None and room.transfer.is_done for room in rooms):
            assert time.monotonic() < ends_s
            for room in rooms:
                room.transfers.advance(0.001)
                while room.inbox:
                    assert room.transfer is not None
                    room.transfer.receive(*room.inbox.pop(0))
        require_ring(rooms)
    finally:
        cluster.close()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_announced_by_peer_messages_and_brought_by_ways(
    rooms: list[Room], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of two blocks at most: a layer's three blocks are several, from each member to each."""
    monkeypatch.setattr(bulk, "PIECE_BYTES", 2 * BLOCK)
    monkeypatch.setattr(BulkChannel, "most_bytes", 2 * BLOCK)
    with nccl_is_there() if backend == "nccl" else contextlib.nullcontext():
        cluster = LocalCluster(SIZE, timeout_s=60.0, backend=backend)
        try:
            ways = [found for found in cluster.ways(*range(SIZE)) if found is not None]
            inboxes: list[queue.SimpleQueue[tuple[int, bytes, Landed]]] = [queue.SimpleQueue() for _ in rooms]

            def announce(src: int, dst: int, parts: Sequence[bytes]) -> None:
                head, num_bytes = parts
                ways[dst].receive(src, int(num_bytes), lambda landed: inboxes[dst].put((src, head, landed)), print)

            for rank, room in enumerate(rooms):
                channel = BulkChannel(ways[rank], partial(announce, rank), lambda *_: pytest.fail("by message"))
                room.transfer = room.transfers.submit(ring(room, LAYERS), channel)
            ends_s = time.monotonic() + 60.0
            while not all(room.transfer is not None and room.transfer.is_done for room in rooms):
                assert time.monotonic() < ends_s
                for room, inbox in zip(rooms, inboxes, strict=True):
                    room.transfers.advance(0.001)
                    while not inbox.empty():
                        src, head, landed = inbox.get()
                        assert room.transfer is not None
                        room.transfer.receive(src, [head, landed.take()])
            require_ring(rooms)
        finally:
            cluster.close()


@pytest.mark.parametrize("junk", [b"", b"1 2", b"1 2 3 4", b"1 2 three", b"\xff\x00"])
def test_a_header_that_is_none_is_refused(junk: bytes) -> None:
    with pytest.raises(EngineError, match="header that is none"):
        read_header(junk)
