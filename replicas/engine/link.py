"""The ingress's end of the request channel to one instance."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import msgspec

from pengserve.planners.types.contract import NO_CONTRACT, Contract
from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.snapshot import InstanceStats, KvCapacity
from pengserve.replicas.channel import handshake
from pengserve.replicas.channel.frames import Frame, FrameKind, encode, read
from pengserve.replicas.channel.server import HEARTBEAT_S, SILENT_BEATS, credentials
from pengserve.replicas.channel.tcp import notice_silence, send_at_once
from pengserve.replicas.engine.vllm_seam import EngineCoreRequest
from pengserve.replicas.engine.wire import AddRequest, Codec, Moved, Paused, Reorder, StepBatch, Trial, Welcome

__all__ = ["InstanceLink", "Moved", "Paused", "StepBatch", "Trial"]


class InstanceLink:
    """A connection to one incarnation of one instance. Once lost it stays lost; connect to its successor."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, welcome: Welcome) -> None:
        self._reader, self._writer, self._codec = reader, writer, Codec()
        self._lost: str = ""
        self._num_frames = self._num_seen = self._num_silent = 0  # frames; those at the last look; looks without any
        self._is_watched = False
        self.was_closed_there = False  # by the instance or its end; else the instance may live
        self.key: InstanceKey = welcome.key
        self.capacity: KvCapacity = welcome.capacity
        self.stats = InstanceStats()

    @classmethod
    async def connect(
        cls, endpoint: str, *, token: str, client_id: str, fingerprint: str = "", timeout_s: float = 5.0
    ) -> "InstanceLink":
        """Connects to `endpoint` ("host:port"); both ends prove that they know `token`.

        Raises:
            LinkLostError: no process listens there, the token is wrong, it is an instance of another configuration
                than `fingerprint` names, or no answer came in `timeout_s`.
        """
        host, _, port = endpoint.rpartition(":")
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(timeout_s):
                reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
                send_at_once(writer.get_extra_info("socket"))
                notice_silence(writer.get_extra_info("socket"), SILENT_BEATS * HEARTBEAT_S)
                await handshake.connect(reader, writer, credentials(token, fingerprint), client_id.encode())
                return cls(reader, writer, _welcome(endpoint, await read(reader)))
        except (OSError, TimeoutError, ValueError, LinkLostError) as error:
            if writer is not None:
                writer.close()
            raise LinkLostError(f"cannot connect to the instance at {endpoint}: {error or 'no answer'}") from error

    def add(
        self,
        request: EngineCoreRequest,
        output_token_ids: Sequence[int] = (),
        *,
        is_tried_alone: bool = False,
        predicted_hit_tokens: int = 0,
        contract: Contract = NO_CONTRACT,
    ) -> None:
        """Sends a request; with output tokens the instance resumes it after them, as if it had made them itself.

        One that is to be tried alone starts when all that runs there is proven harmless; a `Trial` tells when.
        `predicted_hit_tokens` of its prompt are expected in the instance's prefix cache: the instance only counts them.
        `contract` goes along with the request wherever it goes.

        Raises:
            LinkLostError: the instance is gone.
        """
        sent = None if contract is NO_CONTRACT else contract
        add = AddRequest(request, list(output_token_ids), is_tried_alone, predicted_hit_tokens, sent)
        self._send(FrameKind.ADD, self._codec.encode_add(add))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Asks the instance to forget these requests. Nothing to do where it is gone already."""
        with contextlib.suppress(LinkLostError):
            self._send(FrameKind.ABORT, [msgspec.msgpack.encode(list(request_ids))])

    def reorder(self, orders: Sequence[tuple[str, int, float]]) -> None:
        """Gives requests another `(priority, arrival_time)`. Nothing to do where the instance is gone already."""
        with contextlib.suppress(LinkLostError):
            self._send(FrameKind.REORDER, [msgspec.msgpack.encode(Reorder(list(orders)))])

    async def events(self) -> AsyncIterator[StepBatch | Moved | Trial | Paused]:
        """Every token batch, MOVED, TRIAL and PAUSED in order; heartbeats (no outputs) among them. One reader only.

        Raises:
            LinkLostError: the instance is gone, always in the end.
        """
        self._is_watched = True
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._watch)
        try:
            while True:
                frame = await read(self._reader)
                self._num_frames += 1
                if frame.kind is FrameKind.MOVED:
                    yield msgspec.msgpack.decode(frame.parts[0], type=Moved)
                    continue
                if frame.kind is FrameKind.TRIAL:
                    yield msgspec.msgpack.decode(frame.parts[0], type=Trial)
                    continue
                if frame.kind is FrameKind.PAUSED:
                    yield msgspec.msgpack.decode(frame.parts[0], type=Paused)
                    continue
                batch = self._codec.decode_batch(frame.parts)
                self.stats = batch.stats
                if batch.stats.hang:
                    raise LinkLostError(batch.stats.hang)
                yield batch
        except (LinkLostError, msgspec.MsgspecError, IndexError) as error:
            self.was_closed_there = not self._lost
            hang = f"instance {self.key}: {self.stats.hang}" if self.stats.hang else ""
            self._lost = self._lost or hang or f"instance {self.key} closed its channel"
            raise LinkLostError(self._lost) from error
        finally:
            self._is_watched = False
            self._writer.transport.abort()

    def _watch(self) -> None:
        """Checks once a heartbeat whether a frame came. After `SILENT_BEATS` checks without one the link is lost.

        A late event loop also checks late, so its own lag does not count as silence. Frames that came meanwhile are
        read before the next check.
        """
        if not self._is_watched:
            return
        self._num_silent = self._num_silent + 1 if self._num_frames == self._num_seen else 0
        self._num_seen = self._num_frames
        if self._num_silent >= SILENT_BEATS:
            self._lost = f"instance {self.key} was silent for {SILENT_BEATS * HEARTBEAT_S:g} s"
            self._writer.transport.abort()  # the reader ends with an error
            return
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._watch)

    async def close(self) -> None:
        """Closes the connection; the instance aborts what is still running for it."""
        self._lost = self._lost or f"the link to instance {self.key} was closed here"
        self._writer.transport.abort()

    def _send(self, kind: FrameKind, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        if self._lost or self._writer.is_closing():
            raise LinkLostError(self._lost or f"instance {self.key} closed its channel")
        try:
            self._writer.writelines(encode(kind, parts))
        except (OSError, RuntimeError) as error:  # uvloop raises the latter where the transport has just closed
            self._lost = f"the channel to instance {self.key} cannot be written: {error}"
            self._writer.transport.abort()  # the reader ends with an error
            raise LinkLostError(self._lost) from error


def _welcome(endpoint: str, frame: Frame) -> Welcome:
    try:
        welcome = msgspec.msgpack.decode(frame.parts[0], type=Welcome)
    except (msgspec.MsgspecError, IndexError) as error:
        raise LinkLostError(f"what listens at {endpoint} is no PengServe instance") from error
    if welcome.stats.hang:
        raise LinkLostError(welcome.stats.hang)
    return welcome
