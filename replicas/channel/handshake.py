"""The handshake of every connection between PengServe's own processes: both ends prove that they know the secret.

    listener   -> CHALLENGE  version, nonce
    connector  -> HELLO      version, nonce, fingerprint, claim, proof
    listener   -> ANSWER     proof, or why it refuses

Each message is a u32 length (little-endian) and msgpack. A proof is HMAC-SHA256, keyed with the application's token,
over the protocol's name and version, the prover's role, both nonces, the fingerprint and the claim. The token itself
never crosses the wire, and a proof is worth nothing in another connection, role or protocol.

The claim says who connects and what for; its form is the protocol's. The fingerprint names the model, configuration
and versions: processes of two configurations never talk to each other.
"""

import asyncio
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from pengserve.planners.types.errors import LinkLostError

HANDSHAKE_TIMEOUT_S = 5.0  # for all of it, however slowly the bytes come
MAX_HANDSHAKE_BYTES = 4 << 10  # of one message
NONCE_BYTES = 32

LENGTH = struct.Struct("<I")
_CONNECTOR, _LISTENER = b"connector", b"listener"

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What both ends must have alike before they say anything else."""

    protocol: str  # e.g. "request channel"
    version: int
    token: str = field(repr=False)
    fingerprint: str = ""  # of the model, configuration and versions


class Challenge(msgspec.Struct, array_like=True):
    """First message of a connection, from the listener."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, array_like=True):
    """The connector's answer to a challenge."""

    version: int
    nonce: bytes
    fingerprint: str
    claim: bytes
    proof: bytes


class Answer(msgspec.Struct, array_like=True):
    """The listener's answer to a HELLO. After a refusal it closes."""

    proof: bytes = b""
    refusal: str = ""


def challenge(credentials: Credentials) -> Challenge:
    """A challenge for one connection."""
    return Challenge(credentials.version, secrets.token_bytes(NONCE_BYTES))


def respond(credentials: Credentials, asked: Challenge, claim: bytes) -> Hello:
    """The connector's HELLO.

    Raises:
        LinkLostError: the listener speaks another version, or its nonce has another length.
    """
    if asked.version != credentials.version:
        raise LinkLostError(_other_version(credentials, asked.version))
    if len(asked.nonce) != NONCE_BYTES:
        raise LinkLostError("the other side sent a challenge of another length")
    hello = Hello(credentials.version, secrets.token_bytes(NONCE_BYTES), credentials.fingerprint, claim, b"")
    hello.proof = _proof(credentials, _CONNECTOR, asked, hello)
    return hello


def refusal_of(credentials: Credentials, asked: Challenge, hello: Hello) -> str:
    """Why the listener lets `hello` not in, or an empty string. Says nothing of its own to a stranger."""
    if hello.version != credentials.version:
        return _other_version(credentials, hello.version)
    is_proven = hmac.compare_digest(hello.proof, _proof(credentials, _CONNECTOR, asked, hello))
    if len(hello.nonce) != NONCE_BYTES or not is_proven:
        return "wrong channel token"
    if hello.fingerprint != credentials.fingerprint:
        return (
            f"its model, configuration or version is another one (fingerprint {credentials.fingerprint}, not"
            f" {hello.fingerprint})"
        )
    return ""


def accept(credentials: Credentials, asked: Challenge, hello: Hello) -> Answer:
    """The listener's own proof, once `refusal_of` has found no reason against `hello`."""
    return Answer(_proof(credentials, _LISTENER, asked, hello))


def verify(credentials: Credentials, asked: Challenge, hello: Hello, answer: Answer) -> None:
    """The connector's check of the listener.

    Raises:
        LinkLostError: the listener refused, or does not know the token.
    """
    if answer.refusal:
        raise LinkLostError(f"refused: {answer.refusal}")
    if not hmac.compare_digest(answer.proof, _proof(credentials, _LISTENER, asked, hello)):
        raise LinkLostError("what listens there does not know the channel token")


def pack(message: msgspec.Struct) -> bytes:
    """A message as it goes over the wire."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes | bytearray, kind: type[S]) -> S:
    """A message without its length. Raises LinkLostError where it is none of that kind."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LinkLostError("the other side sent no handshake") from error


def size_of(head: bytes | bytearray) -> int:
    """Bytes that follow a length. Raises LinkLostError where no handshake is so long."""
    (size,) = LENGTH.unpack(head)
    if not 0 < size <= MAX_HANDSHAKE_BYTES:
        raise LinkLostError(f"a handshake of {size} bytes is outside [1, {MAX_HANDSHAKE_BYTES}]")
    return int(size)


async def connect(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, credentials: Credentials, claim: bytes
) -> None:
    """The connector's side, on streams. The caller bounds it in time.

    Raises:
        LinkLostError: the listener refused, closed, or is no such listener.
    """

    async def receive(kind: type[S]) -> S:
        try:
            return unpack(await reader.readexactly(size_of(await reader.readexactly(LENGTH.size))), kind)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LinkLostError("the other side closed the connection in the handshake") from error

    asked = await receive(Challenge)
    hello = respond(credentials, asked, claim)
    writer.write(pack(hello))
    verify(credentials, asked, hello, await receive(Answer))


def connect_blocking(sock: socket.socket, credentials: Credentials, claim: bytes, timeout_s: float) -> None:
    """The connector's side, on a blocking socket; the whole of it takes `timeout_s` at most.

    Raises:
        LinkLostError: the listener refused, closed, took too long, or is no such listener.
    """
    deadline_s = time.monotonic() + timeout_s

    def receive(kind: type[S]) -> S:
        head = _receive_exactly(sock, LENGTH.size, deadline_s)
        return unpack(_receive_exactly(sock, size_of(head), deadline_s), kind)

    try:
        asked = receive(Challenge)
        hello = respond(credentials, asked, claim)
        sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        sock.sendall(pack(hello))
        verify(credentials, asked, hello, receive(Answer))
    except OSError as error:
        raise LinkLostError(f"the handshake ended: {error}") from error


def _receive_exactly(sock: socket.socket, size: int, deadline_s: float) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left_s)
        count = sock.recv_into(view)
        if count == 0:
            raise LinkLostError("the other side closed the connection in the handshake")
        view = view[count:]
    return data


def _proof(credentials: Credentials, role: bytes, asked: Challenge, hello: Hello) -> bytes:
    """The HMAC over all that the two have said, under the fingerprint that the connector names."""
    mac = hmac.new(credentials.token.encode(), digestmod="sha256")
    version = credentials.version.to_bytes(4, "little")
    fingerprint = hello.fingerprint.encode()
    for part in (credentials.protocol.encode(), version, role, asked.nonce, hello.nonce, fingerprint, hello.claim):
        mac.update(LENGTH.pack(len(part)))  # with its length: no two lists of parts are the same bytes
        mac.update(part)
    return mac.digest()


def _other_version(credentials: Credentials, version: int) -> str:
    return f"{credentials.protocol} {version} is not {credentials.version}; run the same PengServe everywhere"
