"""One TCP connection between two peers: what they claim in the handshake, and messages after it.

    | u32 length of what follows | u8 size of kind | u8 number of parts n | kind | u32 length of part | x n | part ... |

Lengths are little-endian.
"""

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.channel.handshake import Credentials
from pengserve.replicas.channel.tcp import block

logger = logging.getLogger(__name__)

PEER_PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 256 << 20
READ_BUFFER_BYTES = 64 << 10

_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<IBB")


class Claim(msgspec.Struct, array_like=True):
    """What the peer that connects says in its handshake: who it is, whom it wants, and what for."""

    sender: tuple[int, int]  # slot and incarnation
    receiver: tuple[int, int]
    stream: str = ""  # name of a byte stream for one group; empty: the connection carries messages


def credentials(token: str, fingerprint: str) -> Credentials:
    """What both ends of a peer connection must have alike. The claim is a `Claim` in msgpack."""
    return Credentials(protocol="peer channel", version=PEER_PROTOCOL_VERSION, token=token, fingerprint=fingerprint)


def decode_claim(claim: bytes) -> Claim:
    """What a peer that has proven the token claims. Raises LinkLostError where it is no claim."""
    try:
        return msgspec.msgpack.decode(claim, type=Claim)
    except msgspec.MsgspecError as error:
        raise LinkLostError("the other side is no peer") from error


def refusal_of(claim: Claim, own: InstanceKey) -> str:
    """Why a peer with this claim may not connect, or an empty string."""
    if claim.receiver != (own.instance_id, own.incarnation):
        return f"this is instance {own}"
    if claim.sender[0] <= own.instance_id:
        return "of two peers, the one with the higher slot connects"
    return ""


def key_pair(key: InstanceKey) -> tuple[int, int]:
    """A key as a claim carries it."""
    return key.instance_id, key.incarnation


def key_of(pair: tuple[int, int]) -> InstanceKey:
    """The key that `key_pair` made `pair` from."""
    return InstanceKey(instance_id=InstanceId(pair[0]), incarnation=pair[1])


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
        block(sock, timeout_s)

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
