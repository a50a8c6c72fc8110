"""Laws of the instance's end: an end is an EOF at once, frames arrive whole and in order, slow readers are cut off."""

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from pengserve.planners.types.errors import LinkLostError
from pengserve.replicas.channel import handshake
from pengserve.replicas.channel import server as server_module
from pengserve.replicas.channel.frames import Buffer, Frame, FrameKind
from pengserve.replicas.channel.server import ChannelServer, credentials
from tests.support.waiting import until

TOKEN = "secret"
TIMEOUT_S = 60.0


class Handler:
    """Notes what it hears."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.lost = threading.Event()

    def welcome(self) -> Sequence[Buffer]:
        return [b"welcome"]

    def on_frame(self, client_index: int, frame: Frame) -> None:
        self.frames.append(frame)

    def on_lost(self, client_index: int) -> None:
        self.lost.set()

    def heartbeat(self) -> Sequence[Buffer]:
        return [b"beat"]


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def server(handler: Handler) -> Iterator[ChannelServer]:
    running = ChannelServer(host="127.0.0.1", token=TOKEN, handler=handler)
    running.start()
    yield running
    running.stop()


class Peer:
    """A client with a plain socket, so that nothing is hidden."""

    def __init__(self, server: ChannelServer, *, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(("127.0.0.1", server.port))
        handshake.connect_blocking(self.socket, credentials(TOKEN, ""), b"peer", TIMEOUT_S)
        self.socket.settimeout(TIMEOUT_S)
        assert self.read() == (FrameKind.WELCOME, b"welcome")

    def read(self) -> tuple[FrameKind, bytes]:
        """Kind and first part of the next frame."""
        (total,) = struct.unpack("<I", self.exactly(4))
        body = self.exactly(total)
        return FrameKind(body[0]), body[2 + 4 * body[1] :]

    def exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = self.socket.recv(num_bytes - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def read_batches(self) -> Iterator[bytes]:
        """Payloads of batches; heartbeats are left out."""
        while True:
            kind, payload = self.read()
            assert kind is FrameKind.BATCH
            if payload != b"beat":
                yield payload


def test_stopping_is_an_eof_at_once(server: ChannelServer) -> None:
    peer = Peer(server)
    started_s = time.monotonic()
    server.stop()
    with pytest.raises((EOFError, ConnectionResetError)):
        for _ in peer.read_batches():
            continue
    assert time.monotonic() - started_s < 16.0


def test_a_lost_peer_is_told_of(server: ChannelServer, handler: Handler) -> None:
    Peer(server).socket.close()
    assert handler.lost.wait(TIMEOUT_S)
    server.send(0, [b"to nobody"])
    assert server.client_indices() == []


def test_who_was_welcomed_hears_what_is_sent_at_once(server: ChannelServer) -> None:
    for index in range(50):
        peer = Peer(server)
        server.send(index, [b"first"])
        assert next(peer.read_batches()) == b"first"


def test_frames_arrive_whole_and_in_order_through_a_backlog(server: ChannelServer) -> None:
    peer = Peer(server, receive_buffer=4096)
    payloads = [bytes([i % 251]) * (1 + (i * 7919) % 60_000) for i in range(400)]  # far more than the kernel takes
    buffer = bytearray()
    for payload in payloads:
        buffer[:] = payload
        server.send(0, [buffer])  # the same buffer again and again, as vLLM's encoder may do
    received = peer.read_batches()
    assert [next(received) for _ in payloads] == payloads


def test_heartbeats_come_when_nothing_else_does(server: ChannelServer) -> None:
    peer = Peer(server)
    assert peer.read() == (FrameKind.BATCH, b"beat")


def test_a_beat_reaches_everybody_at_once(server: ChannelServer) -> None:
    peers = [Peer(server), Peer(server)]
    for peer in peers:
        server.send(peers.index(peer), [b"busy"])  # nobody is quiet for as long as a heartbeat
    server.beat()
    for peer in peers:
        assert [peer.read()[1], peer.read()[1]] == [b"busy", b"beat"]


def test_a_peer_that_does_not_read_is_cut_off(
    server: ChannelServer, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_UNSENT_BYTES", 1 << 20)
    peer = Peer(server, receive_buffer=4096)
    for _ in range(2000):
        server.send(0, [bytes(10_000)])
        if handler.lost.is_set():
            break
    assert handler.lost.wait(TIMEOUT_S)
    peer.socket.close()


def test_an_unplugged_ingress_is_noticed_within_the_silent_bound(server: ChannelServer) -> None:
    """What the kernel is told, as a cable cannot be pulled here: an idle connection is probed, a write has an end."""
    peer = Peer(server)
    until(lambda: server.client_indices() == [0])
    sock = server._clients[0].writer.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == server_module.SILENT_S * 1000
    probes_s = sum(
        sock.getsockopt(socket.IPPROTO_TCP, option) * times
        for option, times in (
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)),
        )
    )
    assert probes_s <= server_module.SILENT_S + 1
    peer.socket.close()


def test_noise_after_the_handshake_costs_that_connection_alone(server: ChannelServer, handler: Handler) -> None:
    honest, noisy = Peer(server), Peer(server)
    for noise in (b"\xff\xff\xff\xff", b"\x06\x00\x00\x00\x04\xff\x00\x00\x00\x00", b"\x02\x00\x00\x00\xee\x00"):
        noisy.socket.sendall(noise)
        assert handler.lost.wait(TIMEOUT_S)
        handler.lost.clear()
        noisy.socket.close()
        noisy = Peer(server)
    server.send(0, [b"still here"])
    assert next(honest.read_batches()) == b"still here"
    noisy.socket.close()
    honest.socket.close()


def test_a_stranger_gets_no_client_and_no_thread(server: ChannelServer) -> None:
    num_threads = threading.active_count()
    strangers = [socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) for _ in range(100)]
    peer = Peer(server)
    until(lambda: server.client_indices() == [0])
    assert threading.active_count() <= num_threads
    for connection in (*strangers, peer.socket):
        connection.close()


@pytest.mark.parametrize(
    ("token", "fingerprint", "why"),
    [("a guess", "", "wrong channel token"), (TOKEN, "another model", "model, configuration or version")],
)
def test_who_does_not_belong_here_is_refused(server: ChannelServer, token: str, fingerprint: str, why: str) -> None:
    with (
        socket.create_connection(("127.0.0.1", server.port), TIMEOUT_S) as sock,
        pytest.raises(LinkLostError, match=why),
    ):
        handshake.connect_blocking(sock, credentials(token, fingerprint), b"stranger", TIMEOUT_S)
    assert server.client_indices() == []
