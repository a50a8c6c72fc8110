"""A connection between an ingress and an instance, in virtual time: in order, late, and cut by partitions.

The ingress's end is a real `InstanceLink` over a real `StreamReader`.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from pengserve.replicas.channel.frames import Buffer, Frame, FrameKind, encode, read
from tests.world.chaos import LATENCY_S, Chaos

_END = b""


class Pipe:
    """One direction: bytes go in, and come out in order when the network lets them."""

    def __init__(self, chaos: Chaos, ends: tuple[str, str], deliver: Callable[[bytes], None]) -> None:
        self._chaos, self._ends, self._deliver = chaos, ends, deliver
        self._under_way: deque[bytes] = deque()
        self._is_over = False

    def send(self, data: bytes) -> None:
        """Puts `data` on its way; `_END` is the end of the connection."""
        if not self._is_over:
            self._is_over = data == _END
            self._under_way.append(data)
            self._later(LATENCY_S)

    def end(self, num_lost: int = 0) -> None:
        """Ends the connection, of which the last `num_lost` pieces that are under way never arrive."""
        for _ in range(min(num_lost, len(self._under_way))):
            self._under_way.pop()
        self.send(_END)

    def _later(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._next)

    def _next(self) -> None:
        if until_s := self._chaos.heals_at_s(*self._ends):
            self._later(until_s - self._chaos.now_s + LATENCY_S)
        elif self._under_way:
            self._deliver(self._under_way.popleft())


class IngressEnd:
    """What `InstanceLink` takes for its `StreamWriter`, and for that one's transport."""

    def __init__(self, chaos: Chaos, reader: asyncio.StreamReader, pipe: Pipe) -> None:
        self.transport, self._chaos, self._reader, self._pipe = self, chaos, reader, pipe
        self._is_closed = False

    def writelines(self, buffers: list[Buffer]) -> None:
        self._chaos.reach("link.write")
        self._pipe.send(b"".join(buffers))

    def is_closing(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        """Closes at once; what came and was not read is lost."""
        if not self._is_closed:
            self._is_closed = True
            self._pipe.end()
            asyncio.get_running_loop().call_soon(self.hear, _END)

    def hear(self, data: bytes) -> None:
        """Bytes from the instance, or the end."""
        if self._reader.at_eof() or self._reader._eof:
            return
        if data and not self._is_closed:
            self._reader.feed_data(data)
        elif not data:
            self._is_closed = True
            self._reader.feed_eof()


class InstanceEnd:
    """The instance's end: frames to send, and a task that hands on what comes."""

    def __init__(
        self, chaos: Chaos, ends: tuple[str, str], client_id: str, on_frame: Callable[["InstanceEnd", Frame], Any]
    ) -> None:
        self.client_id, self.last_sent_s = client_id, 0.0
        self._chaos, self._on_frame = chaos, on_frame
        self._reader = asyncio.StreamReader(limit=1 << 20)
        ingress_reader = asyncio.StreamReader(limit=1 << 20)
        to_instance = Pipe(chaos, ends, self._hear)
        self.ingress_reader, self.ingress_end = ingress_reader, IngressEnd(chaos, ingress_reader, to_instance)
        self._to_ingress = Pipe(chaos, ends, self.ingress_end.hear)

    def send(self, parts: list[Buffer], kind: FrameKind = FrameKind.BATCH) -> None:
        """Sends a frame."""
        self.last_sent_s = self._chaos.now_s
        self._to_ingress.send(b"".join(encode(kind, parts)))

    def end(self) -> None:
        """The instance's process is gone: the kernel closes the connection, and may drop what it had not sent."""
        self._to_ingress.end(num_lost=self._chaos.rng.choice((0, 0, 1, 100)))
        if not self._reader._eof:
            self._reader.feed_eof()

    async def read_all(self, may_run: Callable[[], Any]) -> None:
        """Hands frames on until the connection ends; raises LinkLostError then. Waits while a process is stopped."""
        while True:
            frame = await read(self._reader)
            await may_run()
            self._on_frame(self, frame)

    def _hear(self, data: bytes) -> None:
        if self._reader._eof:
            return
        if data:
            self._reader.feed_data(data)
        else:
            self._reader.feed_eof()
