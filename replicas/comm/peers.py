"""The connections of one instance to its peers: one for messages to each, and byte streams for groups on top.

Of two peers the one with the higher slot connects to the other's listener. One thread accepts connections and shakes
hands; each connection that has proven the token has one reader thread.
"""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pengserve.planners.types.directory import PeerAddress
from pengserve.planners.types.errors import EngineError, LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.channel import handshake
from pengserve.replicas.channel.door import Door, Entrant
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.channel.tcp import block
from pengserve.replicas.comm.link import Claim, Link, credentials, decode_claim, key_of, key_pair, refusal_of

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 1.0  # for the thread that accepts
MAX_PARKED_S = 60.0  # a stream that no group claims for so long belongs to a group that will not be built

MessageHandler = Callable[[InstanceKey, str, list[memoryview]], None]
LostHandler = Callable[[InstanceKey], None]


@dataclass(frozen=True, slots=True)
class _Parked:
    sock: socket.socket
    since_s: float


class PeerNetwork:
    """Listens on `host`, at a port of the system's choice; `connect` brings the peers.

    Handlers are called in reader threads and must not block: `on_message(key, kind, parts)` in the order of sending,
    with parts that own their memory, and `on_lost(key)` exactly once for each connection that ends, for any
    reason, unless this network was closed. A handler that raises ends that connection.

    Raises:
        EngineError: the host's address cannot be bound.
    """

    def __init__(
        self,
        key: InstanceKey,
        host: str,
        token: str,
        on_message: MessageHandler,
        on_lost: LostHandler,
        timeout_s: float,
        fingerprint: str = "",
    ) -> None:
        """Peers must know `token` and be of the configuration that `fingerprint` names."""
        self.key, self.host, self.timeout_s = key, host, timeout_s
        self._credentials = credentials(token, fingerprint)
        self._on_message = on_message
        self._on_lost: list[LostHandler] = [on_lost]
        self._handlers: dict[str, MessageHandler] = {}
        self._links: dict[InstanceKey, Link] = {}
        self._listed: dict[InstanceKey, PeerAddress] = {}
        self._parked: dict[tuple[InstanceKey, str], _Parked] = {}
        self._changed = threading.Condition()  # guards the three above
        self._connecting = threading.Lock()
        self._is_closed = False
        try:
            self._listener = socket.create_server((host, 0), backlog=128)
        except OSError as error:
            raise EngineError(f"peers cannot reach {host} ({error}); set instances.channel_host") from error
        self.endpoint = f"{host}:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()  # of the thread that accepts
        self._accepting: asyncio.Task[None] | None = None
        self._accepted = self._spawn(self._accept_all, "peers-accept")

    def subscribe(self, kind: str, on_message: MessageHandler, on_lost: LostHandler | None = None) -> None:
        """Sends messages of `kind` to `on_message` instead. Call before the first `connect`."""
        self._handlers[kind] = on_message
        if on_lost is not None:
            self._on_lost.append(on_lost)

    def connect(self, addresses: Iterable[PeerAddress], timeout_s: float) -> None:
        """Connects with exactly these peers: what was listed before and is not now is dropped, what is there stays.

        Raises:
            LinkLostError: peers are missing after `timeout_s`, or refuse; the others are connected.
        """
        deadline_s = time.monotonic() + timeout_s
        own_slot = self.key.instance_id
        listed = {a.key: a for a in addresses if a.key.instance_id != own_slot}
        failures: dict[InstanceKey, str] = {}
        with self._connecting:
            with self._changed:
                # A peer that was never listed may know a newer directory than we do: it stays.
                dropped = [link for key, link in self._links.items() if key in self._listed and key not in listed]
                self._listed = listed
                wanted = [address for key, address in listed.items() if key not in self._links]
            for link in dropped:
                link.close()
            for address in wanted:
                self._spawn(self._dial, f"peer-{address.key}", address, deadline_s, failures)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or all(key in self._links or key in failures for key in listed),
                    max(0.0, deadline_s - time.monotonic()),
                )
                missing = [key for key in sorted(listed) if key not in self._links]
        if missing:
            reasons = ", ".join(f"{key} ({failures.get(key, 'no connection in time')})" for key in missing)
            raise LinkLostError(f"instance {self.key} misses its peers {reasons}; it needs a newer directory")

    def send(self, key: InstanceKey, kind: str, parts: Sequence[Buffer]) -> None:
        """Sends one message from the calling thread, without copying parts, in at most the network's time-out.

        Messages to one peer arrive in the order of these calls.

        Raises:
            LinkLostError: the peer is not connected, or was lost while sending.
        """
        link = self._links.get(key)
        if link is None:
            raise LinkLostError(f"instance {key} is not connected with {self.key}; it needs a newer directory")
        link.send(kind, parts)

    def peers(self) -> tuple[InstanceKey, ...]:
        """Peers connected now, in order."""
        with self._changed:
            return tuple(sorted(self._links))

    def open_stream(self, key: InstanceKey, name: str, timeout_s: float) -> socket.socket:
        """A connection to `key` that carries bytes, not messages. Both call this with the same name, once.

        Returns a blocking socket that the caller owns; its sends wait no longer than the network's time-out.

        Raises:
            LinkLostError: the peer is gone, or did not ask for the stream in time.
        """
        deadline_s = time.monotonic() + timeout_s
        if key < self.key:
            address = self._listed.get(key)
            if address is None:
                raise LinkLostError(f"instance {key} is not listed as a peer of {self.key}")
            return self._connect_to(address, name, deadline_s)
        with self._changed:
            while (parked := self._parked.pop((key, name), None)) is None:
                left_s = deadline_s - time.monotonic()
                if key not in self._links or left_s <= 0:
                    raise LinkLostError(f"instance {key} did not open {name} within {timeout_s} s")
                self._changed.wait(left_s)
        return parked.sock

    def close(self) -> None:
        """Ends every connection and the listener. Streams that were handed out stay open. Idempotent."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            links = list(self._links.values())
            for parked in self._parked.values():
                parked.sock.close()
            self._parked.clear()
            self._changed.notify_all()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end_accepting)
        self._accepted.join(CLOSE_TIMEOUT_S)
        for link in links:
            link.close()
        for link in links:
            link.ended.wait(1.0)

    def _spawn(self, function: Callable[..., None], name: str, *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=function, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def _dial(self, address: PeerAddress, deadline_s: float, failures: dict[InstanceKey, str]) -> None:
        try:
            if address.key.instance_id > self.key.instance_id:
                # That peer connects to us. If it no longer listens, this finds out long before the time-out.
                socket.create_connection(_host_port(address), max(0.001, deadline_s - time.monotonic())).close()
                return
            sock = self._connect_to(address, "", deadline_s)
        except (OSError, LinkLostError) as error:
            with self._changed:
                failures[address.key] = str(error)
                self._changed.notify_all()
            return
        link = Link(address.key, sock, self.timeout_s)
        if self._register(link):
            self._read(link)
        else:
            link.release()

    def _connect_to(self, address: PeerAddress, stream: str, deadline_s: float) -> socket.socket:
        """Connects and shakes hands. Raises LinkLostError, never OSError."""
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection(_host_port(address), max(0.001, deadline_s - time.monotonic()))
            claim = msgspec.msgpack.encode(Claim(key_pair(self.key), key_pair(address.key), stream))
            left_s = max(0.001, deadline_s - time.monotonic())
            handshake.connect_blocking(sock, self._credentials, claim, left_s)
            block(sock, self.timeout_s)
        except (OSError, LinkLostError) as error:
            if sock is not None:
                sock.close()
            raise LinkLostError(f"instance {address.key} at {address.endpoint}: {error}") from error
        return sock

    def _accept_all(self) -> None:
        door = Door(self._listener, self._credentials, self._admit)
        try:
            if not self._is_closed:
                self._accepting = self._loop.create_task(door.run())
                with contextlib.suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(self._accepting)
            self._loop.run_until_complete(door.close())
        finally:
            self._listener.close()
            self._loop.close()

    def _end_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()

    async def _admit(self, entrant: Entrant) -> None:
        """Takes a peer that has proven the token: its connection gets a thread, or a refusal."""
        try:
            claim = decode_claim(entrant.claim)
            refusal = refusal_of(claim, self.key)
            key = key_of(claim.sender)
            if not refusal and claim.stream and key not in self._links:
                refusal = "a stream needs a connected peer"
            if refusal:
                logger.warning("refused a peer that says it is %s: %s", key, refusal)
                await self._loop.sock_sendall(entrant.sock, entrant.refused(refusal))
                entrant.sock.close()
                return
            self._spawn(self._welcome, f"peer-{key}", entrant, key, claim.stream)
        except (OSError, RuntimeError, LinkLostError) as error:  # e.g. no thread can be started
            logger.warning("a peer could not be welcomed: %s", error)
            entrant.sock.close()

    def _welcome(self, entrant: Entrant, key: InstanceKey, stream: str) -> None:
        """Reads the messages of the peer that connected, or parks its stream."""
        try:
            if stream:
                self._park(key, stream, entrant)
                return
            link = Link(key, entrant.sock, self.timeout_s)
        except OSError as error:
            logger.debug("a connection ended in its handshake: %s", error)
            entrant.sock.close()
            return
        # Registered before the answer: a peer that reads it may open streams at once.
        is_registered = False
        with link.holding_sends(), contextlib.suppress(OSError):
            is_registered = self._register(link)
            if is_registered:
                entrant.sock.sendall(entrant.accepted)
        if is_registered:
            self._read(link)
        else:
            link.release()

    def _park(self, key: InstanceKey, name: str, entrant: Entrant) -> None:
        sock = entrant.sock
        block(sock, self.timeout_s)
        sock.sendall(entrant.accepted)
        now_s = time.monotonic()
        with self._changed:
            stale = [k for k, parked in self._parked.items() if now_s - parked.since_s > MAX_PARKED_S]
            for old in [*stale, (key, name)]:
                if (parked := self._parked.pop(old, None)) is not None:
                    parked.sock.close()
            if self._is_closed:
                sock.close()
                return
            self._parked[key, name] = _Parked(sock, now_s)
            self._changed.notify_all()

    def _register(self, link: Link) -> bool:
        """Makes `link` the connection to its peer, after an older one has ended and said so."""
        while True:
            with self._changed:
                older = self._links.get(link.key)
                if older is None and not self._is_closed:
                    self._links[link.key] = link
                    self._changed.notify_all()
                    return True
            if older is None:
                return False
            older.close()
            if not older.ended.wait(self.timeout_s):
                return False

    def _read(self, link: Link) -> None:
        key = link.key

        def deliver(kind: str, parts: list[memoryview]) -> None:
            self._handlers.get(kind, self._on_message)(key, kind, parts)

        try:
            link.read_all(deliver)
        except (OSError, LinkLostError) as error:
            logger.debug("the connection to instance %s broke: %s", key, error)
        except Exception:
            logger.exception("a message of instance %s could not be handled; closing its connection", key)
        try:
            self._forget(link)
            if not self._is_closed:
                for on_lost in self._on_lost:
                    on_lost(key)
        finally:
            link.ended.set()
            link.release()

    def _forget(self, link: Link) -> None:
        with self._changed:
            del self._links[link.key]
            for parked_key in [k for k in self._parked if k[0] == link.key]:
                self._parked.pop(parked_key).sock.close()
            self._changed.notify_all()


def _host_port(address: PeerAddress) -> tuple[str, int]:
    host, _, port = address.endpoint.rpartition(":")
    return host, int(port)
