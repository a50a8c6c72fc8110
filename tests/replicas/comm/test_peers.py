"""Laws of the peer network: messages arrive whole and in order, strangers are refused, a loss is told exactly once."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec
import pytest

from pengserve.planners.types.directory import PeerAddress
from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.channel import handshake
from pengserve.replicas.comm.link import PEER_PROTOCOL_VERSION, Claim, credentials
from pengserve.replicas.comm.peers import PeerNetwork
from tests.support.waiting import until

TIMEOUT_S = 2.0


@dataclass
class Node:
    """One network, with what it heard."""

    key: InstanceKey
    token: str = "a token"
    received: list[tuple[InstanceKey, str, list[bytes]]] = field(default_factory=list)
    lost: list[InstanceKey] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)  # the handler waits for it

    def __post_init__(self) -> None:
        self.gate.set()
        self.network = PeerNetwork(self.key, "127.0.0.1", self.token, self.on_message, self.lost.append, TIMEOUT_S)

    def on_message(self, key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        self.gate.wait(30)
        self.received.append((key, kind, [bytes(part) for part in parts]))

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(key=self.key, endpoint=self.network.endpoint)


def key(slot: int, life: int = 0) -> InstanceKey:
    return InstanceKey(instance_id=InstanceId(slot), incarnation=life)


def connect(*nodes: Node, timeout_s: float = TIMEOUT_S) -> list[LinkLostError | None]:
    """All learn of all at the same time; the error of each."""
    errors: list[LinkLostError | None] = [None] * len(nodes)

    def run(i: int) -> None:
        try:
            nodes[i].network.connect([node.address for node in nodes], timeout_s)
        except LinkLostError as error:
            errors[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return errors


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    made = [Node(key(slot)) for slot in range(3)]
    assert connect(*made) == [None] * 3
    yield made
    for node in made:
        node.gate.set()
        node.network.close()


def test_all_are_connected(nodes: list[Node]) -> None:
    for node in nodes:
        assert node.network.peers() == tuple(other.key for other in nodes if other is not node)


def test_messages_of_a_thread_arrive_in_order_and_whole_under_load(nodes: list[Node]) -> None:
    num_messages, num_threads = 100, 3

    def flood(sender: Node, receiver: Node, thread: int) -> None:
        for i in range(num_messages):
            body = bytes([i % 251]) * (i * 397 % 3000 if i % 10 else 1_500_000 + i)
            sender.network.send(receiver.key, f"kind{thread}", [i.to_bytes(4), body, b"", memoryview(body)[:7]])

    pairs = [(nodes[0], nodes[1]), (nodes[1], nodes[0]), (nodes[2], nodes[0])]
    threads = [threading.Thread(target=flood, args=(*pair, t)) for pair in pairs for t in range(num_threads)]
    for thread in threads:
        thread.start()
    until(lambda: sum(len(node.received) for node in nodes) == len(pairs) * num_threads * num_messages, 30)
    for sender, receiver in pairs:
        for t in range(num_threads):
            messages = [parts for k, kind, parts in receiver.received if k == sender.key and kind == f"kind{t}"]
            assert [int.from_bytes(parts[0]) for parts in messages] == list(range(num_messages))
            for i, (_, body, empty, head) in enumerate(messages):
                assert body == bytes([i % 251]) * (i * 397 % 3000 if i % 10 else 1_500_000 + i)
                assert empty == b"" and head == body[:7]


def test_the_end_of_a_peer_is_told_once_and_it_cannot_be_sent_to(nodes: list[Node]) -> None:
    nodes[1].network.close()
    until(lambda: nodes[0].lost == [key(1)] and nodes[2].lost == [key(1)])
    with pytest.raises(LinkLostError, match=r"1\.0"):
        nodes[0].network.send(key(1), "x", [])
    nodes[0].network.send(key(2), "x", [b"still here"])
    until(lambda: len(nodes[2].received) == 1)
    assert nodes[0].lost == [key(1)] and nodes[1].lost == []


def test_connect_keeps_what_is_there_and_drops_what_is_not_listed_any_more(nodes: list[Node]) -> None:
    assert connect(*nodes) == [None] * 3
    assert not any(node.lost for node in nodes)
    nodes[0].network.connect([nodes[2].address], TIMEOUT_S)
    until(lambda: nodes[0].lost == [key(1)] and nodes[1].lost == [key(0)])
    assert nodes[0].network.peers() == (key(2),)


def test_a_dead_peer_is_named_before_the_time_out(nodes: list[Node]) -> None:
    gone = [Node(key(0, 5)), Node(key(7))]
    for node in gone:
        node.network.close()
    start_s = time.monotonic()
    with pytest.raises(LinkLostError, match=r"7\.0"):
        nodes[1].network.connect([nodes[0].address, nodes[2].address, gone[1].address], 10.0)
    with pytest.raises(LinkLostError, match=r"0\.5"):
        nodes[1].network.connect([gone[0].address, nodes[2].address], 10.0)
    assert time.monotonic() - start_s < 9.0
    assert key(2) in nodes[1].network.peers()


def test_a_new_life_takes_the_place_of_the_old_one(nodes: list[Node]) -> None:
    nodes[1].network.close()
    replacement = Node(key(1, 1))
    assert connect(nodes[0], replacement, nodes[2]) == [None] * 3
    nodes[2].network.send(key(1, 1), "x", [b"hello"])
    until(lambda: replacement.received == [(key(2), "x", [b"hello"])])
    replacement.network.close()


def test_a_wrong_token_is_refused(nodes: list[Node]) -> None:
    stranger = Node(key(9), token="another token")
    with pytest.raises(LinkLostError, match="wrong channel token"):
        stranger.network.connect([nodes[0].address], TIMEOUT_S)
    assert key(9) not in nodes[0].network.peers()
    stranger.network.close()


@pytest.mark.parametrize(
    ("version", "claim", "reason"),
    [
        (PEER_PROTOCOL_VERSION + 1, Claim((9, 0), (0, 0)), "run the same PengServe"),
        (PEER_PROTOCOL_VERSION, Claim((9, 0), (0, 3)), r"this is instance 0\.0"),
        (PEER_PROTOCOL_VERSION, Claim((0, 1), (0, 0)), "higher slot"),
        (PEER_PROTOCOL_VERSION, Claim((9, 0), (0, 0), "group"), "needs a connected peer"),
    ],
)
def test_a_hello_for_another_is_refused(nodes: list[Node], version: int, claim: Claim, reason: str) -> None:
    port = int(nodes[0].network.endpoint.rpartition(":")[2])
    own = replace(credentials("a token", ""), version=version)
    with socket.create_connection(("127.0.0.1", port), 5) as sock, pytest.raises(LinkLostError, match=reason):
        handshake.connect_blocking(sock, own, msgspec.msgpack.encode(claim), 5)


def test_a_peer_of_another_configuration_is_refused(nodes: list[Node]) -> None:
    port = int(nodes[0].network.endpoint.rpartition(":")[2])
    claim = msgspec.msgpack.encode(Claim((9, 0), (0, 0)))
    with (
        socket.create_connection(("127.0.0.1", port), 5) as sock,
        pytest.raises(LinkLostError, match="model, configuration or version"),
    ):
        handshake.connect_blocking(sock, credentials("a token", "another"), claim, 5)


def test_strangers_have_no_threads_and_do_not_keep_peers_out(nodes: list[Node]) -> None:
    port = int(nodes[0].network.endpoint.rpartition(":")[2])
    num_threads = threading.active_count()
    strangers = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(200)]
    try:
        latecomer = Node(key(9))
        latecomer.network.connect([nodes[0].address], TIMEOUT_S)
        until(lambda: key(9) in nodes[0].network.peers())
        # The latecomer's own: one that accepts, one that reads, and one that reads at the other end.
        assert threading.active_count() <= num_threads + 3
        latecomer.network.close()
    finally:
        for stranger in strangers:
            stranger.close()


def test_noise_at_the_listener_harms_nobody(nodes: list[Node]) -> None:
    port = int(nodes[0].network.endpoint.rpartition(":")[2])
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x05\x00\x00\x00abcde"):
        with socket.create_connection(("127.0.0.1", port), 5) as sock:
            sock.sendall(noise)
            with contextlib.suppress(OSError):  # the listener may have closed already
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(100):  # the challenge
                    continue
    nodes[1].network.send(key(0), "x", [b"fine"])
    until(lambda: len(nodes[0].received) == 1)


def test_a_peer_that_reads_nothing_is_given_up_after_the_time_out(nodes: list[Node]) -> None:
    nodes[1].gate.clear()
    start_s = time.monotonic()
    with pytest.raises(LinkLostError):
        for _ in range(200):
            nodes[0].network.send(key(1), "x", [bytes(1 << 20)])
    assert time.monotonic() - start_s < 2 * TIMEOUT_S + 8
    until(lambda: nodes[0].lost == [key(1)])


def test_a_handler_that_fails_costs_its_connection_alone(nodes: list[Node]) -> None:
    def fail(key: InstanceKey, kind: str, parts: list[memoryview]) -> None:
        raise ValueError("not understood")

    nodes[0].network.subscribe("bad", fail)
    nodes[1].network.send(key(0), "bad", [])
    until(lambda: nodes[0].lost == [key(1)] and nodes[1].lost == [key(0)])
    assert nodes[0].network.peers() == (key(2),)


def test_streams_of_a_name_meet_in_either_order(nodes: list[Node]) -> None:
    low, high = nodes[0].network, nodes[2].network
    first = high.open_stream(key(0), "early", TIMEOUT_S)  # before the other asks
    second = low.open_stream(key(2), "early", TIMEOUT_S)
    first.sendall(b"ping")
    assert second.recv(4) == b"ping"
    start_s = time.monotonic()
    with pytest.raises(LinkLostError, match="never"):
        low.open_stream(key(2), "never", 0.2)
    assert time.monotonic() - start_s < 1.9  # the time-out of others is 2 s
    first.close()
    second.close()
