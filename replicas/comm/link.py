"""One TCP connection between two peers: the handshake, and messages.

    | u32 length of what follows | u8 size of kind | u8 number of parts n | kind | u32 length of part | x n | part ... |

Lengths are little-endian. Both handshake frames are a u32 length and msgpack: HELLO of the one that connected, ANSWER
of the one that listens.
"""

import contextlib
import hmac
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.channel.frames import Buffer

logger = logging.getLogger(__name__)

PEER_PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 256 << 20
MAX_HELLO_BYTES = 4 << 10
HELLO_TIMEOUT_S = 5.0
READ_BUFFER_BYTES = 64 << 10

_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<IBB")
_TIMEVAL = struct.Struct("@ll")

S = TypeVar("S", bound=msgspec.Struct)


class Hello(msgspec.Struct):
    """First frame of a connection, from the one that connected."""

    version: int
    token: str
    sender: tuple[int, int]  # slot and incarnation
    receiver: tuple[int, int]
    stream: str = ""  # name of a byte stream for one group; empty: the connection carries messages


class Answer(msgspec.Struct):
    """What the listener says to a HELLO; after a refusal it closes."""

    refusal: str = ""


def set_options(sock: socket.socket, timeout_s: float) -> None:
    """Makes `sock` blocking without Nagle's delay, and lets no call wait longer than `timeout_s`.

    Kernel time-outs rather than Python's: those cost a `poll` before each call. A host that vanished without an EOF
    counts as dead after `timeout_s` too.
    """
    timeval = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6))
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(timeout_s * 1e3))


def set_receive_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Lets no receive on the blocking `sock` wait longer than `timeout_s` for a byte."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6)))


def say_hello(sock: socket.socket, hello: Hello) -> None:
    """The connecting side of the handshake, on a socket with a Python time-out.

    Raises:
        LinkLostError: the listener refused, closed, or is no peer.
    """
    _send_struct(sock, hello)
    answer = _receive_struct(sock, Answer)
    if answer.refusal:
        raise LinkLostError(f"the peer refused: {answer.refusal}")


def hear_hello(sock: socket.socket) -> Hello:
    """The listening side: what the other wants. Raises LinkLostError where it is no peer."""
    return _receive_struct(sock, Hello)


def answer_hello(sock: socket.socket, refusal: str = "") -> None:
    """Ends the handshake; a refusal says why."""
    _send_struct(sock, Answer(refusal))


def refusal_of(hello: Hello, own: InstanceKey, token: str) -> str:
    """Why `hello` may not connect, or an empty string."""
    if not hmac.compare_digest(hello.token.encode(), token.encode()):
        return "wrong channel token"
    if hello.version != PEER_PROTOCOL_VERSION:
        return f"peer protocol {hello.version} is not {PEER_PROTOCOL_VERSION}; run the same PengServe everywhere"
    if hello.receiver != (own.instance_id, own.incarnation):
        return f"this is instance {own}"
    if hello.sender[0] <= own.instance_id:
        return "of two peers, the one with the higher slot connects"
    return ""


def key_pair(key: InstanceKey) -> tuple[int, int]:
    """A key as HELLO carries it."""
    return key.instance_id, key.incarnation


def key_of(pair: tuple[int, int]) -> InstanceKey:
    """The key that `key_pair` made `pair` from."""
    return InstanceKey(instance_id=InstanceId(pair[0]), incarnation=pair[1])


def _send_struct(sock: socket.socket, value: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(value)
    sock.sendall(_LENGTH.pack(len(body)) + body)


def _receive_struct(sock: socket.socket, kind: type[S]) -> S:
    head = bytearray(_LENGTH.size)
    receive_exactly(sock, memoryview(head))
    (size,) = _LENGTH.unpack(head)
    if size > MAX_HELLO_BYTES:
        raise LinkLostError(f"a handshake of {size} bytes is longer than {MAX_HELLO_BYTES}")
    body = bytearray(size)
    receive_exactly(sock, memoryview(body))
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise LinkLostError("the other side sent no handshake of a peer") from error


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fills `view`. Raises LinkLostError at the end of the stream, and what the socket raises."""
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise LinkLostError("the peer closed the connection")
        view = view[count:]


class Link:
    """A connection that carries messages, after its handshake. Many threads may send, one reads."""

    def __init__(self, key: InstanceKey, sock: socket.socket, timeout_s: float) -> None:
        self.key = key
        self.ended = threading.Event()  # its reader has called the handler of losses
        self._sock, self._timeout_s = sock, timeout_s
        self._sending = threading.Lock()
        set_options(sock, timeout_s)

    def send(self, kind: str, parts: Sequence[Buffer]) -> None:
        """Sends one message; parts are not copied.

        Raises:
            LinkLostError: the peer is gone, or took nothing for the link's time-out. The link is then closed.
        """
        name = kind.encode()
        sizes = [memoryview(part).nbytes for part in parts]
        total = 2 + len(name) + 4 * len(sizes) + sum(sizes)
        if total > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {total} bytes is longer than {MAX_MESSAGE_BYTES}")
        head = _HEADER.pack(total, len(name), len(sizes)) + name + b"".join(map(_LENGTH.pack, sizes))
        deadline_s = time.monotonic() + self._timeout_s
        if not self._sending.acquire(timeout=self._timeout_s):
            raise LinkLostError(f"instance {self.key} took no message for {self._timeout_s:g} s; it counts as lost")
        try:
            sent_bytes = self._sock.sendmsg([head, *parts])
            if sent_bytes < total + 4:
                self._send_rest([head, *parts], sent_bytes, deadline_s)
        except OSError as error:  # also a time-out: half a message may be on its way, so nothing may follow it
            self.close()
            raise LinkLostError(f"the connection to instance {self.key} broke ({error})") from error
        finally:
            self._sending.release()

    @contextlib.contextmanager
    def holding_sends(self) -> Iterator[None]:
        """Makes `send` wait, so that the handshake's answer goes first."""
        with self._sending:
            yield

    def _send_rest(self, buffers: Sequence[Buffer], skip_bytes: int, deadline_s: float) -> None:
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            rest, skip_bytes = view[skip_bytes:], max(0, skip_bytes - len(view))
            while rest:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"not sent within {self._timeout_s} s")
                rest = rest[self._sock.send(rest) :]

    def read_all(self, deliver: Callable[[str, list[memoryview]], None]) -> None:
        """Calls `deliver(kind, parts)` for each message until the connection ends. Parts own their memory."""
        buffer = bytearray(READ_BUFFER_BYTES)
        view = memoryview(buffer)
        filled = 0
        while count := self._sock.recv_into(view[filled:]):
            filled += count
            start = 0
            while filled - start >= 4:
                (total,) = _LENGTH.unpack_from(buffer, start)
                if not 2 <= total <= MAX_MESSAGE_BYTES:
                    raise LinkLostError(f"a message of {total} bytes is outside [2, {MAX_MESSAGE_BYTES}]")
                stop = start + 4 + total
                if stop <= filled:
                    deliver(*_parse(memoryview(bytearray(view[start + 4 : stop]))))
                    start = stop
                elif 4 + total > READ_BUFFER_BYTES:
                    body = memoryview(bytearray(total))
                    body[: filled - start - 4] = view[start + 4 : filled]
                    receive_exactly(self._sock, body[filled - start - 4 :])
                    deliver(*_parse(body))
                    start = filled
                else:
                    break
            view[: filled - start] = view[start:filled]
            filled -= start

    def close(self) -> None:
        """Ends the connection for both sides; the reader sees the end of the stream. From any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Gives the socket back. Only the reader calls this, at its end: no other thread receives on the socket."""
        self.close()
        with self._sending:
            self._sock.close()


def _parse(body: memoryview) -> tuple[str, list[memoryview]]:
    name_bytes, num_parts = body[0], body[1]
    start = 2 + name_bytes + 4 * num_parts
    parts = []
    try:
        kind = str(body[2 : 2 + name_bytes], "utf-8")
        for i in range(num_parts):
            (size,) = _LENGTH.unpack_from(body, 2 + name_bytes + 4 * i)
            parts.append(body[start : start + size])
            start += size
    except (struct.error, UnicodeDecodeError) as error:
        raise LinkLostError("the peer sent a malformed message") from error
    if start != len(body):
        raise LinkLostError("the peer sent a message whose lengths do not add up")
    return kind, parts
