"""The listener's side of a handshake on streams, for tests that play an instance."""

import asyncio

from pengserve.replicas.channel import handshake
from pengserve.replicas.channel.handshake import LENGTH, Answer, Credentials, Hello


async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, credentials: Credentials) -> bytes:
    """Shakes hands with what connected; its claim, or empty where it was refused."""
    asked = handshake.challenge(credentials)
    writer.write(handshake.pack(asked))
    size = handshake.size_of(await reader.readexactly(LENGTH.size))
    hello = handshake.unpack(await reader.readexactly(size), Hello)
    if refusal := handshake.refusal_of(credentials, asked, hello):
        writer.write(handshake.pack(Answer(refusal=refusal)))
        return b""
    writer.write(handshake.pack(handshake.accept(credentials, asked, hello)))
    return hello.claim
