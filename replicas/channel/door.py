"""The door of a listener: a connection costs a process little until it has proven the application's token.

Connections that have proven nothing yet are bounded in number, in bytes and in time, and none of them has a thread.
Where there are too many, the one that has waited longest makes room: an honest handshake takes milliseconds.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from pengserve.planners.types.errors import LinkLostError
from pengserve.replicas.channel import handshake
from pengserve.replicas.channel.handshake import Answer, Challenge, Credentials, Hello

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # connections in their handshake
MAX_WAITING_PER_SOURCE = 16  # ... from one address
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0  # after an accept that failed, e.g. for want of file descriptors
REPORT_S = 60.0  # between two lines of the log about strangers


class Entrant:
    """A connection that has proven the token: a non-blocking socket, and what it claims to be."""

    def __init__(self, sock: socket.socket, credentials: Credentials, asked: Challenge, hello: Hello) -> None:
        self.sock, self.claim = sock, hello.claim
        self.accepted = handshake.pack(handshake.accept(credentials, asked, hello))  # to be sent, to let it in

    def refused(self, why: str) -> bytes:
        """What to send instead of `accepted`, before closing."""
        return handshake.pack(Answer(refusal=why))


class Door:
    """Accepts connections on `listener` and calls `admit(entrant)` for those that prove the token.

    All of it runs in the event loop that calls `run`. `admit` owns the socket from then on and sends the answer.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        admit: Callable[[Entrant], Awaitable[None]],
        timeout_s: float = handshake.HANDSHAKE_TIMEOUT_S,
    ) -> None:
        self._listener, self._credentials, self._admit, self._timeout_s = listener, credentials, admit, timeout_s
        self._listener.setblocking(False)
        self._waiting: dict[asyncio.Task[None], str] = {}  # handshakes by age, with the address they come from
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_strangers = 0  # that were refused, too slow, malformed, or made room for others
        self._num_reported, self._reported_s = 0, float("-inf")
        self._pause_s = 0.0  # since the newest accept failed; 0: it did not

    async def run(self) -> None:
        """Accepts until cancelled. No error of the system ends this: it is logged once, and tried again."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(self._listener)
                self._begin(sock, str(address[0]))
            except (OSError, MemoryError, RuntimeError) as error:
                await self._wait_out(error)
                continue
            if self._pause_s:
                logger.info("connections are accepted again")
                self._pause_s = 0.0
            await asyncio.sleep(0)  # a flood of connections must leave time for the handshakes before

    async def close(self) -> None:
        """Ends every handshake and every `admit` that still runs. The listener stays the caller's."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def num_waiting(self) -> int:
        """Connections in their handshake now."""
        return len(self._waiting)

    def _begin(self, sock: socket.socket, source: str) -> None:
        of_source = [task for task, other in self._waiting.items() if other == source]
        if len(of_source) >= MAX_WAITING_PER_SOURCE:
            self._turn_away(of_source[0])
        elif len(self._waiting) >= MAX_WAITING:
            self._turn_away(next(iter(self._waiting)))
        try:
            task = asyncio.get_running_loop().create_task(self._serve(sock, source))
        except BaseException:
            sock.close()
            raise
        self._waiting[task] = source
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: self._waiting.pop(done, None))
        # A task that is cancelled before its first step never runs, and would not close its socket.
        task.add_done_callback(lambda done: sock.close() if done.cancelled() else None)

    def _turn_away(self, task: asyncio.Task[None]) -> None:
        del self._waiting[task]
        task.cancel()
        self._count("too many connections wait for their handshake")

    async def _serve(self, sock: socket.socket, source: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                entrant = await self._shake_hands(sock)
        except ConnectionError:
            entrant = None
        except (OSError, TimeoutError, LinkLostError) as error:
            sock.close()
            self._count(f"{source}: {str(error) or type(error).__name__}")
            return
        if (task := asyncio.current_task()) is not None:
            self._waiting.pop(task, None)
        if entrant is None:  # it went away by itself: a port check, or a peer that looks whether this one listens
            sock.close()
            return
        await self._admit(entrant)

    async def _shake_hands(self, sock: socket.socket) -> Entrant | None:
        loop = asyncio.get_running_loop()
        asked = handshake.challenge(self._credentials)
        await loop.sock_sendall(sock, handshake.pack(asked))
        head = await _receive(sock, handshake.LENGTH.size)
        if head is None:
            return None
        body = await _receive(sock, handshake.size_of(head))
        if body is None:
            raise LinkLostError("it closed the connection in the handshake")
        hello = handshake.unpack(body, Hello)
        if refusal := handshake.refusal_of(self._credentials, asked, hello):
            await loop.sock_sendall(sock, handshake.pack(Answer(refusal=refusal)))
            raise LinkLostError(refusal)
        return Entrant(sock, self._credentials, asked, hello)

    def _count(self, why: str) -> None:
        """One line for each stranger at debug level, and a warning with their number once a minute at most."""
        self.num_strangers += 1
        logger.debug("%s: a connection ended in its handshake: %s", self._credentials.protocol, why)
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORT_S:
            number = self.num_strangers - self._num_reported
            self._num_reported, self._reported_s = self.num_strangers, now_s
            logger.warning(
                "%s: %d connections ended in their handshake; the last one: %s", self._credentials.protocol, number, why
            )

    async def _wait_out(self, error: BaseException) -> None:
        if not self._pause_s:
            logger.error("connections cannot be accepted for now: %s: %s", type(error).__name__, error)
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), MAX_PAUSE_S)
        await asyncio.sleep(self._pause_s)


async def _receive(sock: socket.socket, size: int) -> bytearray | None:
    """Exactly `size` bytes, and not one of what follows; None where the connection ends before the first of them."""
    data = bytearray(size)
    filled = 0
    loop = asyncio.get_running_loop()
    while filled < size:
        count = await loop.sock_recv_into(sock, memoryview(data)[filled:])
        if count == 0:
            if filled:
                raise LinkLostError("it closed the connection in the handshake")
            return None
        filled += count
    return data
