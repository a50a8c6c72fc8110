"""Laws of what goes between members beside their steps: over gloo, and over a fake that keeps NCCL's rules."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.comm import bulk
from pengserve.replicas.comm.bulk import BulkWays, Landed
from pengserve.replicas.comm.pool import CommunicatorPool
from pengserve.replicas.comm.torch_group import TorchCommunicator
from tests.replicas.comm.fake_nccl import nccl_is_there
from tests.replicas.comm.local import LocalCluster

SIZE = 3
PIECE = 4096
WAIT_S = 60.0
AT_ONCE_S = 5.0  # on a busy machine; without the abort it would be for ever
NCCL_ALONE = pytest.mark.parametrize("backend", ["nccl"], indirect=True)  # gloo ends a call where a connection ends


@pytest.fixture(params=["nccl", "gloo"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with nccl_is_there() if request.param == "nccl" else contextlib.nullcontext():
        yield request.param


class Ends:
    """The ways of some members. Announcements go by queues, in place of peer messages."""

    def __init__(self, cluster: LocalCluster, *slots: int) -> None:
        found = cluster.ways(*slots)
        self.ways = [ways for ways in found if ways is not None]
        assert len(self.ways) == len(slots)
        self.landed: list[queue.SimpleQueue[tuple[int, Landed | EngineError]]] = [queue.SimpleQueue() for _ in slots]

    def announce(self, src: int, dst: int, num_bytes: int) -> None:
        here = lambda found: self.landed[dst].put((src, found))  # noqa: E731
        self.ways[dst].receive(src, num_bytes, here, here)

    def send(self, src: int, dst: int, data: torch.Tensor) -> None:
        self.ways[src].send(dst, data, lambda: self.announce(src, dst, data.numel()))

    def next_of(self, dst: int) -> tuple[int, Landed]:
        src, found = self.landed[dst].get(timeout=WAIT_S)
        assert isinstance(found, Landed), found
        return src, found


@pytest.fixture
def cluster(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    monkeypatch.setattr(bulk, "PIECE_BYTES", PIECE)
    made = LocalCluster(SIZE, timeout_s=WAIT_S, backend=backend)
    yield made
    made.close()


def content(src: int, dst: int, number: int) -> torch.Tensor:
    size = PIECE - 100 * (number % 3)
    return torch.full((size,), (50 * src + 20 * dst + number) % 251, dtype=torch.uint8)


def test_all_send_to_all_at_once_and_no_sender_waits_for_a_step_thread(cluster: LocalCluster) -> None:
    """More pieces than there are rooms, and none is taken before all have been sent; memory is used again at once."""
    ends, count = Ends(cluster, 0, 1, 2), 12

    def send_all(src: int) -> None:
        memory = torch.empty(PIECE, dtype=torch.uint8)
        for number in range(count):
            for dst in range(SIZE):
                if dst != src:
                    data = memory[: content(src, dst, number).numel()]
                    ends.send(src, dst, data.copy_(content(src, dst, number)))
                    memory.fill_(255)

    threads = [threading.Thread(target=send_all, args=[src], daemon=True) for src in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "a sender waits for pieces to be taken"
    for dst in range(SIZE):
        numbers = dict.fromkeys(range(SIZE), 0)
        for _ in range(count * (SIZE - 1)):
            src, landed = ends.next_of(dst)
            assert torch.equal(landed.take(), content(src, dst, numbers[src])), "in the order of sending"
            numbers[src] += 1


def test_a_piece_that_was_taken_leaves_its_room_and_is_no_other_s_memory(cluster: LocalCluster) -> None:
    ends = Ends(cluster, 0, 1)
    taken = []
    for number in range(20):
        ends.send(0, 1, content(0, 1, number))
        taken.append(ends.next_of(1)[1].take())
        assert not any(room.data.data_ptr() == taken[-1].data_ptr() for room in ends.ways[1]._landings[0]._rooms)
    assert all(torch.equal(data, content(0, 1, number)) for number, data in enumerate(taken))
    assert len(ends.ways[1]._landings[0]._landed) <= 1, "nothing keeps what was taken"


def test_what_is_no_piece_is_refused(cluster: LocalCluster) -> None:
    [ways, *_] = Ends(cluster, 0, 1).ways
    for src, num_bytes in ((0, 1), (7, 1), (1, 0), (1, PIECE + 1)):
        with pytest.raises(EngineError, match="announced"):
            ways.receive(src, num_bytes, print, print)


def after(seconds: float, call: Callable[..., object], *arguments: object) -> None:
    threading.Timer(seconds, call, arguments).start()


@NCCL_ALONE
def test_a_receiver_that_dies_frees_the_step_thread_that_sends(cluster: LocalCluster) -> None:
    """The reader's thread aborts; what is under way has no receiver."""
    ends = Ends(cluster, 0, 1)
    pool, [name] = cluster.members[0].pool, cluster.members[0].pool.ready()
    begun_s = time.monotonic()
    after(0.2, pool.mark_failed, name)
    with pytest.raises(EngineError, match="aborted"):
        for number in range(2):
            ends.ways[0].send(1, content(0, 1, number), lambda: None)  # no one hears of it
    assert time.monotonic() - begun_s < AT_ONCE_S
    assert pool.bulk(name) is None and name in pool.failed()
    with pytest.raises(EngineError):
        ends.ways[0].send(1, content(0, 1, 2), lambda: None)


@NCCL_ALONE
def test_a_sender_that_dies_before_its_piece_is_told_to_the_receiver(cluster: LocalCluster) -> None:
    ends = Ends(cluster, 0, 1)
    begun_s = time.monotonic()
    ends.announce(0, 1, PIECE)
    after(0.2, cluster.members[1].pool.mark_failed, cluster.members[1].pool.ready()[0])
    src, error = ends.landed[1].get(timeout=WAIT_S)
    assert src == 0 and isinstance(error, EngineError)
    assert time.monotonic() - begun_s < AT_ONCE_S


def test_where_one_member_has_no_ways_none_has_and_the_group_serves(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = CommunicatorPool._connected

    def refused(pool: CommunicatorPool, spec: object, name: str, timeout_s: float, *rest: int) -> TorchCommunicator:
        if pool is cluster.members[1].pool and name.endswith("from-1"):
            raise RuntimeError("out of memory")
        return connected(pool, spec, name, min(timeout_s, 1.0), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(CommunicatorPool, "_connected", refused)
    assert cluster.ways(0, 1, 2) == [None] * SIZE
    group = [member.pool.get(member.pool.ready()[0]) for member in cluster.members]
    assert [float(t) for t in cluster.on(group, lambda c: c.all_reduce(torch.ones(1)))] == [3.0] * SIZE  # type: ignore[arg-type]


def test_ends_of_a_group_end_its_ways(cluster: LocalCluster) -> None:
    ends = Ends(cluster, 0, 1)
    ends.send(0, 1, content(0, 1, 0))
    ends.next_of(1)
    cluster.all(lambda member: member.pool.build([]))
    landing = ends.ways[1]._landings[0]
    landing._thread.join(WAIT_S)
    assert not landing._thread.is_alive()
    assert all(communicator.is_broken for communicator in ends.ways[0]._communicators)


def test_tensor_parallel_groups_and_own_tcp_have_none() -> None:
    with nccl_is_there():
        cluster = LocalCluster(2, timeout_s=WAIT_S, backend="nccl")
        spec = cluster.spec(0, 1)
        cluster.all(lambda member: member.pool.build([spec]))
        assert [member.pool.bulk(spec.name) for member in cluster.members] == [None, None]
        cluster.close()
    own: list[BulkWays | None] = []
    cluster = LocalCluster(2, timeout_s=WAIT_S)
    own = cluster.ways(0, 1)
    cluster.close()
    assert own == [None, None]
