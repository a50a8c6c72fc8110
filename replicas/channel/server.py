"""The instance's end of the request channel: accepts ingresses, hands their frames on, sends them token batches.

Runs its own event loop in its own thread, so that neither the step loop nor Ray's loop waits for a socket.
"""

import asyncio
import contextlib
import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from pengserve.planners.types.errors import EngineError, LinkLostError
from pengserve.replicas.channel.frames import (
    MAX_HELLO_BYTES,
    PROTOCOL_VERSION,
    Buffer,
    Frame,
    FrameKind,
    encode,
    read,
)
from pengserve.replicas.channel.outbox import Outbox

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
HEARTBEAT_S = 1.0
MAX_UNSENT_BYTES = 64 << 20  # an ingress that reads nothing for so long is cut off; it resumes elsewhere


class Hello(msgspec.Struct):
    """First frame of an ingress."""

    version: int
    token: str
    client_id: str


class ChannelHandler(Protocol):
    """What the owner of a server does with frames. Called in the server's thread; must not block."""

    def welcome(self) -> Sequence[Buffer]:
        """Parts of the WELCOME frame."""

    def on_frame(self, client_index: int, frame: Frame) -> None:
        """An ADD or ABORT frame came. A LinkLostError raised here closes that client."""

    def on_lost(self, client_index: int) -> None:
        """That client is gone: its requests have no reader any more."""

    def heartbeat(self) -> Sequence[Buffer]:
        """Parts of an empty BATCH, sent when nothing else was for `HEARTBEAT_S`, and by `beat`."""


class _Client:
    def __init__(
        self, index: int, client_id: str, writer: asyncio.StreamWriter, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.index, self.client_id, self.writer = index, client_id, writer
        self.outbox = Outbox(writer.get_extra_info("socket"), loop)
        self.last_sent_s = 0.0


class ChannelServer:
    """Listens on `host`, at a port of the system's choice."""

    def __init__(self, *, host: str, token: str, handler: ChannelHandler) -> None:
        self._host, self._token, self._handler = host, token.encode(), handler
        self._clients: dict[int, _Client] = {}
        self._welcoming = threading.Lock()  # a client that has read its WELCOME is in `_clients`
        self._next_index = 0
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._run, name="channel", daemon=True)
        self._started = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def start(self, timeout_s: float = 10.0) -> None:
        """Binds and listens.

        Raises:
            EngineError: the address cannot be bound.
        """
        self._thread.start()
        if not self._started.wait(timeout_s) or self._server is None:
            raise EngineError(f"the request channel cannot listen on {self._host}; set instances.channel_host")

    def stop(self, timeout_s: float = 5.0) -> None:
        """Closes every connection and ends the thread."""
        if self._thread.is_alive():
            self.call(self._loop.stop)
            self._thread.join(timeout_s)

    def call(self, function: Callable[[], object]) -> None:
        """Runs `function` in the server's thread soon. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            self._loop.call_soon_threadsafe(function)

    def send(self, client_index: int, parts: Sequence[Buffer], kind: FrameKind = FrameKind.BATCH) -> None:
        """Sends a frame to a client, if it is still there. From any thread; never waits."""
        with self._welcoming:
            client = self._clients.get(client_index)
        if client is None:
            return
        unsent_bytes = client.outbox.send(encode(kind, parts))
        client.last_sent_s = time.monotonic()
        if unsent_bytes > MAX_UNSENT_BYTES:
            logger.warning("client %d reads too slowly; closing it", client_index)
            self.call(client.writer.transport.abort)

    def beat(self) -> None:
        """Sends a heartbeat to every client: what it tells has changed. From any thread; returns at once."""
        self.call(lambda: self._beat_for(self._clients.values()))

    def client_indices(self) -> list[int]:
        """Clients connected now."""
        return list(self._clients)

    def client_id(self, client_index: int) -> str:
        """Name that a client has at every instance; empty where it is gone."""
        client = self._clients.get(client_index)
        return client.client_id if client is not None else ""

    def client_index(self, client_id: str) -> int | None:
        """The newest connection of the client of that name; None where there is none."""
        found = [client.index for client in list(self._clients.values()) if client.client_id == client_id]
        return max(found, default=None)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, self._host, 0, limit=1 << 20)
            )
            self.port = self._server.sockets[0].getsockname()[1]
            self._spawn(self._beat())
            self._started.set()
            self._loop.run_forever()
        except OSError:
            logger.exception("the request channel cannot listen on %s", self._host)
        finally:
            self._started.set()
            for client in self._clients.values():
                client.writer.transport.abort()
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    def _spawn(self, coroutine: "asyncio._CoroutineLike[None]") -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello = await self._hello(reader)
            if isinstance(hello, str):
                writer.writelines(encode(FrameKind.REFUSED, [hello.encode()]))
                await writer.drain()
                return
            client = _Client(self._next_index, hello.client_id, writer, self._loop)
            self._next_index += 1
            with self._welcoming:
                client.outbox.send(encode(FrameKind.WELCOME, self._handler.welcome()))
                self._clients[client.index] = client
            await self._read_all(client, reader)
        except (LinkLostError, ConnectionError):
            logger.debug("a channel client went away")
        except asyncio.CancelledError:
            raise
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is already closing
                writer.close()

    async def _hello(self, reader: asyncio.StreamReader) -> Hello | str:
        """Who this connection is, or why it may not stay."""
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            frame = await read(reader, MAX_HELLO_BYTES)
        try:
            hello = msgspec.msgpack.decode(frame.parts[0], type=Hello)
        except (msgspec.MsgspecError, IndexError):
            return "the first frame must be a HELLO"
        if not hmac.compare_digest(hello.token.encode(), self._token):
            return "wrong channel token"
        if hello.version != PROTOCOL_VERSION:
            return f"channel version {hello.version} is not {PROTOCOL_VERSION}; run the same PengServe everywhere"
        return hello

    async def _read_all(self, client: _Client, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._handler.on_frame(client.index, await read(reader))
        finally:
            del self._clients[client.index]
            client.outbox.close()
            self._handler.on_lost(client.index)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S / 2)
            quiet_since = time.monotonic() - HEARTBEAT_S / 2
            self._beat_for(c for c in self._clients.values() if c.last_sent_s <= quiet_since)

    def _beat_for(self, clients: Iterable[_Client]) -> None:
        if indices := [client.index for client in clients]:
            parts = self._handler.heartbeat()
            for index in indices:
                self.send(index, parts)
