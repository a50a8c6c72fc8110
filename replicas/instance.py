"""One instance: a lane, its step loop and its request channel. Knows neither Ray nor why it is asked anything."""

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import EngineError, LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot, InstanceState, InstanceStats
from pengserve.replicas.channel.frames import Buffer, Frame, FrameKind
from pengserve.replicas.channel.server import ChannelServer
from pengserve.replicas.step_loop import StepLoop

if TYPE_CHECKING:
    from pengserve.replicas.engine.dp_lane import DpLane
    from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs, Request
    from pengserve.replicas.engine.wire import Codec

logger = logging.getLogger(__name__)

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Instance:
    """Hosts one engine in this process. Every public method is thread-safe and returns quickly.

    Threads: the step loop's owns the lane, and encodes and sends its outputs; the channel's receives requests.
    """

    def __init__(
        self, config: InstanceConfig, key: InstanceKey, device: DeviceInfo | None = None, *, bind_host: str = ""
    ) -> None:
        """
        Args:
            bind_host: address for the request channel; the configured one, or loopback, where it is empty.
        """
        self.config, self.key = config, key
        self._host = bind_host or config.channel_host or "127.0.0.1"
        self._device = device or DeviceInfo(device=config.device, pid=os.getpid())
        self._state = InstanceState.STARTING
        self._failure = ""
        self._stats = InstanceStats()
        self._lane: DpLane | None = None
        self._codec: Codec | None = None  # the channel's thread's
        self._step_codec: Codec | None = None
        self._requests: dict[int, set[str]] = {}  # by client index; ids come in the channel's thread and go in both
        self._idle = threading.Event()
        self._idle.set()
        self._server = ChannelServer(host=self._host, token=config.channel_token, handler=self)
        self._loop = StepLoop(
            build=self._build_lane, on_ready=self._ready, on_step=self._stepped, on_failed=self._failed
        )

    def start(self) -> None:
        """Begins to load the model, in another thread; `status` tells when it is ready."""
        self._loop.start()

    @property
    def endpoint(self) -> str:
        """Where ingresses connect, "host:port"; empty until ready."""
        if self._state not in (InstanceState.READY, InstanceState.DRAINING):
            return ""
        host = self._device.node_ip if self._host == "0.0.0.0" else self._host
        return f"{host}:{self._server.port}"

    def failure(self) -> str:
        """Why the instance is DEAD, else an empty string."""
        return self._failure

    def status(self) -> InstanceSnapshot:
        """All that is known of this instance now."""
        return InstanceSnapshot(
            key=self.key,
            state=self._state,
            endpoint=self.endpoint,
            device=self._device,
            capacity=self._lane.capacity if self._lane else None,
            stats=self._stats,
            rss_bytes=_rss_bytes(),
            failure=self._failure,
        )

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing runs or waits here; True when that is so. Requests that still come are served."""
        if self._state is InstanceState.READY:
            self._state = InstanceState.DRAINING
        return self._idle.wait(timeout_s)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the instance; requests in flight are lost to it and resumed elsewhere by the ingress."""
        self._state = InstanceState.DEAD
        self._server.stop()
        if not self._loop.stop(timeout_s):
            logger.warning("the step loop did not end within %g s", timeout_s)

    # The step loop's side -------------------------------------------------------------------------------------

    def _build_lane(self) -> "DpLane":
        # vLLM takes seconds to import and needs its environment set first; nobody else on this floor pays for it.
        from pengserve.replicas.engine.dp_lane import DpLane
        from pengserve.replicas.engine.wire import Codec

        started_s = time.perf_counter()
        self._codec, self._step_codec = Codec(), Codec()
        lane = DpLane(self.config)
        logger.info("instance %s: engine built in %.1f s", self.key, time.perf_counter() - started_s)
        return lane

    def _ready(self, lane: "DpLane") -> None:
        self._lane = lane
        self._stats = lane.stats()
        self._server.start()
        if self._state is InstanceState.STARTING:
            self._state = InstanceState.READY

    def _stepped(self, outputs: Mapping[int, "EngineCoreOutputs"], stats: InstanceStats) -> None:
        self._stats = stats
        assert self._step_codec is not None
        self._send(self._step_codec, outputs, stats)
        self._note_idle()

    def _failed(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        self._state = InstanceState.DEAD
        self._server.stop()  # every ingress sees the end at once and resumes elsewhere

    def _note_idle(self) -> None:
        if self._lane is not None and not self._lane.num_requests():
            self._idle.set()

    # The channel's side ---------------------------------------------------------------------------------------

    def welcome(self) -> Sequence[Buffer]:
        """Parts of the WELCOME frame."""
        from pengserve.replicas.engine.wire import Welcome

        assert self._lane is not None
        return [msgspec.msgpack.encode(Welcome(key=self.key, capacity=self._lane.capacity))]

    def heartbeat(self) -> Sequence[Buffer]:
        """Parts of an empty BATCH."""
        from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs

        assert self._codec is not None
        return [self._codec.encode_stats(self._stats), *self._codec.encode_outputs(EngineCoreOutputs())]

    def on_frame(self, client_index: int, frame: Frame) -> None:
        """Takes an ADD or ABORT."""
        try:
            if frame.kind is FrameKind.ADD:
                self._add(client_index, frame.parts)
            elif frame.kind is FrameKind.ABORT:
                self._abort(client_index, msgspec.msgpack.decode(frame.parts[0], type=list[str]))
            else:
                raise LinkLostError(f"an ingress sent a {frame.kind.name} frame")
        except (msgspec.MsgspecError, IndexError) as error:
            raise LinkLostError("an ingress sent what cannot be decoded") from error

    def on_lost(self, client_index: int) -> None:
        """An ingress is gone: its requests have no reader."""
        request_ids = self._requests.pop(client_index, None)
        if request_ids:
            logger.info("instance %s: a client left; aborting its %d requests", self.key, len(request_ids))
            self._submit_abort(list(request_ids))

    def _add(self, client_index: int, parts: Sequence[Buffer]) -> None:
        assert self._lane is not None and self._codec is not None
        lane, add = self._lane, self._codec.decode_add(parts)
        add.request.client_index = client_index
        request_id = add.request.request_id
        self._requests.setdefault(client_index, set()).add(request_id)
        self._idle.clear()

        def admit(request: "Request") -> None:
            self._loop.submit(lambda: lane.add(request))

        try:
            lane.prepare(add.request, add.output_token_ids, admit)
        except Exception:
            # What reaches here passed the ingress's checks; only this request may suffer for it.
            logger.exception("instance %s cannot take request %s", self.key, request_id)
            self._refuse(client_index, request_id)

    def _refuse(self, client_index: int, request_id: str) -> None:
        from pengserve.replicas.engine.vllm_seam import EngineCoreOutput, EngineCoreOutputs, FinishReason

        output = EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
        assert self._codec is not None
        self._send(self._codec, {client_index: EngineCoreOutputs(outputs=[output])}, self._stats)
        self._loop.submit(self._note_idle)

    def _abort(self, client_index: int, request_ids: list[str]) -> None:
        mine = self._requests.get(client_index, set())
        mine.difference_update(request_ids)
        self._submit_abort(request_ids)

    def _submit_abort(self, request_ids: list[str]) -> None:
        def abort() -> None:
            assert self._lane is not None
            self._lane.abort(request_ids)
            self._note_idle()

        self._loop.submit(abort)

    def _send(self, codec: "Codec", outputs: Mapping[int, "EngineCoreOutputs"], stats: InstanceStats) -> None:
        head = codec.encode_stats(stats)
        for client_index, batch in outputs.items():
            finished = [o.request_id for o in batch.outputs if o.finish_reason is not None]
            if finished and client_index in self._requests:
                self._requests[client_index].difference_update(finished)
            self._server.send(self._addressee(client_index, batch), [head, *codec.encode_outputs(batch)])

    def _addressee(self, client_index: int, batch: "EngineCoreOutputs") -> int:
        """vLLM addresses a step without tokens to client 0; its statistics belong to whoever is there."""
        if batch.outputs:
            return client_index
        connected = self._server.client_indices()
        return client_index if client_index in connected else next(iter(connected), client_index)


def _rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def require_ready(instance: Instance, timeout_s: float) -> None:
    """Waits until `instance` is ready.

    Raises:
        EngineError: it failed, or took longer than `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while instance.status().state is InstanceState.STARTING:
        if time.monotonic() > deadline_s:
            raise EngineError(f"instance {instance.key} was not ready after {timeout_s:g} s")
        time.sleep(0.05)
    if instance.status().state is InstanceState.DEAD:
        raise EngineError(f"instance {instance.key} failed to start: {instance.failure()}")
