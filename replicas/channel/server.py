"""The instance's end of the request channel: accepts ingresses, hands their frames on, sends them token batches.

Runs its own event loop in its own thread, so that neither the step loop nor Ray's loop waits for a socket.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pengserve.planners.types.errors import EngineError, LinkLostError
from pengserve.replicas.channel.door import Door, Entrant
from pengserve.replicas.channel.frames import PROTOCOL_VERSION, Buffer, Frame, FrameKind, encode, read
from pengserve.replicas.channel.handshake import Credentials
from pengserve.replicas.channel.outbox import Outbox
from pengserve.replicas.channel.tcp import notice_silence, send_at_once

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
SILENT_BEATS = 10  # heartbeats that may be missing: a host that lost power sends no EOF
SILENT_S = SILENT_BEATS * HEARTBEAT_S  # after which either end gives the other up
MAX_UNSENT_BYTES = 64 << 20  # an ingress that reads nothing for so long is cut off; it resumes elsewhere
BACKLOG = 128  # connections that the kernel keeps until they are accepted


def credentials(token: str, fingerprint: str) -> Credentials:
    """What both ends of a request channel must have alike. An ingress's claim is its client id, in UTF-8."""
    return Credentials(protocol="request channel", version=PROTOCOL_VERSION, token=token, fingerprint=fingerprint)


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

    def __init__(self, *, host: str, token: str, handler: ChannelHandler, fingerprint: str = "") -> None:
        """Ingresses must know `token` and be of the configuration that `fingerprint` names."""
        self._host, self._handler = host, handler
        self._credentials = credentials(token, fingerprint)
        self._clients: dict[int, _Client] = {}
        self._welcoming = threading.Lock()  # a client that has read its WELCOME is in `_clients`
        self._next_index = 0
        self._loop = asyncio.new_event_loop()
        self._listener: socket.socket | None = None
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
        if not self._started.wait(timeout_s) or self._listener is None:
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
            self._listener = socket.create_server((self._host, 0), family=_family(self._host), backlog=BACKLOG)
            self.port = self._listener.getsockname()[1]
            door = Door(self._listener, self._credentials, self._serve)
            self._spawn(door.run())
            self._spawn(self._beat())
            self._started.set()
            self._loop.run_forever()
            for client in self._clients.values():
                client.writer.transport.abort()
            self._loop.run_until_complete(door.close())
        except OSError:
            logger.exception("the request channel cannot listen on %s", self._host)
        finally:
            self._started.set()
            for task in self._tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            if self._listener is not None:
                self._listener.close()
            self._loop.close()

    def _spawn(self, coroutine: "asyncio._CoroutineLike[None]") -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, entrant: Entrant) -> None:
        """Talks with an ingress that has proven the token, until it is gone."""
        sock = entrant.sock
        try:
            send_at_once(sock)
            notice_silence(sock, SILENT_S)
            reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 20)
        except OSError:
            sock.close()
            return
        try:
            writer.write(entrant.accepted)
            await writer.drain()
            client = _Client(self._next_index, entrant.claim.decode(errors="replace"), writer, self._loop)
            self._next_index += 1
            with self._welcoming:
                client.outbox.send(encode(FrameKind.WELCOME, self._handler.welcome()))
                self._clients[client.index] = client
            await self._read_all(client, reader)
        except (LinkLostError, ConnectionError):
            logger.debug("a channel client went away")
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("a channel client could not be served; closing its connection")
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is already closing
                writer.close()

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


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
