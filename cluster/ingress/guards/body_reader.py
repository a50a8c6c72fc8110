"""Reads bodies: no more of one than its limit, and no more of all that arrive at once than there is memory for."""

import asyncio
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from pengserve.cluster.ingress.errors import OverloadedError, RequestRefused

BODY_TIMEOUT_S = 60.0
SHORT_BYTES = 64 << 10  # of a body; so much of each is read even when all other memory is taken
MAX_ARRIVING_BYTES = 256 << 20  # of all bodies of an ingress that have not yet ended, beyond the short ones
RETRY_AFTER_S = 1


class BodyReader:
    """Reads the bodies of one ingress."""

    def __init__(self, max_arriving_bytes: int = MAX_ARRIVING_BYTES) -> None:
        self._max_arriving_bytes = max_arriving_bytes
        self.arriving_bytes = 0

    async def read(self, headers: Headers, receive: Receive, most: int) -> bytes:
        """The whole body, of at most `most` bytes.

        Raises:
            RequestRefused: it is no JSON (400), too large (413), too slow (408), or it ended early (400).
            OverloadedError: too many long bodies arrive at once; 429.
        """
        if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            raise RequestRefused(400, "Content-Type must be application/json.", param="Content-Type")
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:18]) > most:
            raise too_large(most)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._gather(receive, most)
        except TimeoutError:
            raise RequestRefused(408, f"The body did not arrive within {BODY_TIMEOUT_S:g} s.") from None

    async def _gather(self, receive: Receive, most: int) -> bytes:
        chunks, size, held = [], 0, 0
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise RequestRefused(400, "The body ended early.")
                chunk = message.get("body", b"")
                size += len(chunk)
                if size > most:
                    raise too_large(most)
                if size > SHORT_BYTES:
                    held += self._hold(len(chunk))
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
        finally:
            self.arriving_bytes -= held

    def _hold(self, count: int) -> int:
        if self.arriving_bytes + count > self._max_arriving_bytes:
            raise OverloadedError(
                "Too many long bodies arrive at once. Try again later.", HTTPStatus.TOO_MANY_REQUESTS, RETRY_AFTER_S
            )
        self.arriving_bytes += count
        return count


def replay(body: bytes, receive: Receive) -> Receive:
    """`receive` with the body, already read, as its first message."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


def bounded(receive: Receive, most: int) -> Receive:
    """`receive` that refuses to hand on more than `most` bytes."""
    size = 0

    async def receive_bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > most:
            raise too_large(most)
        return message

    return receive_bounded


def too_large(most: int) -> RequestRefused:
    """The refusal of a body of more than `most` bytes."""
    return RequestRefused(413, f"The body may have at most {most} bytes.")
