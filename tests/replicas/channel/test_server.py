"""Laws of the instance's end: an end is an EOF at once, frames arrive whole and in order, slow readers are cut off."""

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from pengserve.replicas.channel import server as server_module
from pengserve.replicas.channel.frames import PROTOCOL_VERSION, Buffer, Frame, FrameKind, encode
from pengserve.replicas.channel.server import ChannelServer, Hello

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
        hello = msgspec.msgpack.encode(Hello(version=PROTOCOL_VERSION, token=TOKEN, client_id="peer"))
        self.socket.sendall(b"".join(encode(FrameKind.HELLO, [hello])))
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
