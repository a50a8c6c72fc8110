"""Sends one hostile request over a connection of its own, also what no HTTP client would send."""

import asyncio
import contextlib
from typing import NamedTuple

READ_BYTES = 1 << 16


class HostileRequest(NamedTuple):
    """One request. `kind` names what is wrong with it; a `content-length` beyond the body makes it half sent."""

    kind: str
    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def to_bytes(request: HostileRequest) -> bytes:
    """The request as it goes over the wire; it gets a `content-length` where it has none and is not chunked."""
    names = {name.lower() for name, _ in request.headers}
    headers = [(b"host", b"127.0.0.1"), *request.headers, (b"connection", b"close")]
    if not names & {b"content-length", b"transfer-encoding"}:
        headers.append((b"content-length", str(len(request.body)).encode()))
    head = b"".join(b"%s: %s\r\n" % header for header in headers)
    return b"%s %s HTTP/1.1\r\n%s\r\n%s" % (request.method.encode(), request.path.encode(), head, request.body)


async def send(host: str, port: int, request: HostileRequest, timeout_s: float) -> int | None:
    """Sends `request`, reads the whole answer and returns its status; None: the connection ended without one.

    The rest of a half-sent request never comes: the client leaves.

    Raises:
        TimeoutError: neither an answer nor an end came in time.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            with contextlib.suppress(ConnectionError):  # refused while it was sent: the answer is there to read
                writer.write(to_bytes(request))
                await writer.drain()
                if request.kind == "half body":
                    writer.write_eof()
            answer = b""
            try:
                while chunk := await reader.read(READ_BYTES):
                    answer = answer if len(answer) > READ_BYTES else answer + chunk
            except ConnectionError:
                return _status(answer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
    return _status(answer)


def _status(answer: bytes) -> int | None:
    """The status of the final answer, after `100 Continue` and its like; None where there is none."""
    while answer.startswith(b"HTTP/1.1 1"):
        answer = answer.partition(b"\r\n\r\n")[2]
    fields = answer.split(b" ", 2)
    return int(fields[1]) if answer.startswith(b"HTTP/") and len(fields) > 1 and fields[1].isdigit() else None
