"""What ingresses ask of an instance and what they get from it: requests come in frames, tokens go out in batches.

ADD -> decoded, prepared -> the gate -> the lanes             in the channel's thread, then in the step thread
ABORT, REORDER -> the lanes
a step's outputs -> a BATCH for each client                   in the step thread
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.snapshot import InstanceStats
from pengserve.replicas.channel.frames import Buffer, Frame, FrameKind
from pengserve.replicas.channel.server import ChannelServer
from pengserve.replicas.deposits import Deposits
from pengserve.replicas.open_requests import OpenRequests
from pengserve.replicas.trial_gate import TrialGate

if TYPE_CHECKING:
    from pengserve.replicas.engine.instance_lanes import Lanes
    from pengserve.replicas.engine.tiers.parked import Pause
    from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs, Request
    from pengserve.replicas.engine.wire import Codec
    from pengserve.replicas.switching.agent import Agent

logger = logging.getLogger(__name__)


class RequestChannel:
    """The instance's end of all its ingresses' channels. It handles the frames of its `server`."""

    def __init__(
        self,
        key: InstanceKey,
        config: InstanceConfig,
        host: str,
        *,
        lanes: "Callable[[], Lanes]",
        agent: "Callable[[], Agent | None]",
        newest_stats: Callable[[], InstanceStats],
        submit: Callable[[Callable[[], object]], None],
        on_busy: Callable[[], object],
        note_idle: Callable[[], None],
    ) -> None:
        """
        Args:
            host: where it listens.
            lanes: those of the instance, which are there before the server is started.
            agent: the instance's, where elasticity is on.
            submit: runs a call in the step thread.
            on_busy: called when a request has come.
            note_idle: called in the step thread when the instance may have become idle.
        """
        self._key, self._lanes, self._agent, self._newest_stats = key, lanes, agent, newest_stats
        self._submit, self._on_busy, self._note_idle = submit, on_busy, note_idle
        self.server = ChannelServer(host=host, token=config.channel_token, handler=self, fingerprint=config.fingerprint)
        self.requests = OpenRequests(self.server, lambda: submit(self.gate.requests_moved))
        self.deposits = Deposits(self.requests.contract)  # of paced streams, for planners of pauses
        self.gate: TrialGate[Request] = TrialGate(
            let_in=self._let_in,
            tell=self._tell_trial,
            num_requests=lambda: lanes().num_requests(),
            is_reading=lambda: lanes().is_reading(),
        )
        self._codec: Codec | None = None  # the channel's thread's
        self._step_codec: Codec | None = None

    def load(self) -> None:
        """Imports vLLM's messages, which takes seconds. To be called before the server is started."""
        from pengserve.replicas.engine.wire import Codec

        self._codec, self._step_codec = Codec(), Codec()

    # Out, in the step thread ----------------------------------------------------------------------------------

    def send(self, outputs: "Mapping[int, EngineCoreOutputs]", stats: InstanceStats) -> None:
        """Sends a step's outputs to their clients."""
        assert self._step_codec is not None
        self._send(self._step_codec, outputs, stats)

    def tell_pauses(self, pauses: "Sequence[Pause]") -> None:
        """Tells ingresses for how long their requests were parked, and what that copied."""
        from pengserve.replicas.engine.wire import Paused

        for request, seconds, swapped_bytes in pauses:
            frame = msgspec.msgpack.encode(Paused(request.request_id, seconds, swapped_bytes))
            self.server.send(request.client_index, [frame], FrameKind.PAUSED)

    def _tell_trial(self, request: "Request", is_alone: bool) -> None:
        from pengserve.replicas.engine.wire import Trial

        frame = msgspec.msgpack.encode(Trial(request.request_id, is_alone))
        self.server.send(request.client_index, [frame], FrameKind.TRIAL)

    def _let_in(self, request: "Request") -> None:
        lanes, agent = self._lanes(), self._agent()
        if lanes.stepper.is_following and agent is not None:
            # The ingress sent it before it learned that another instance leads.
            lanes.current.count_come(request)
            self.requests.moved([request.request_id], agent.leader, carried=False)
            self._note_idle()
            return
        try:
            self.requests.order(request)
            lanes.add(request)
        except Exception:
            # A half-decoded request of another instance may need what no runner here can do.
            logger.exception("instance %s cannot take request %s over", self._key, request.request_id)
            lanes.abort([request.request_id])
            self._submit(lambda: self.gate.forget([request.request_id]))
            self._refuse(request.client_index, request.request_id)

    def _refuse(self, client_index: int, request_id: str) -> None:
        from pengserve.replicas.engine.vllm_seam import EngineCoreOutput, EngineCoreOutputs, FinishReason

        output = EngineCoreOutput(request_id=request_id, new_token_ids=[], finish_reason=FinishReason.ERROR)
        assert self._codec is not None
        self._send(self._codec, {client_index: EngineCoreOutputs(outputs=[output])}, self._newest_stats())
        self._submit(self._note_idle)

    def _send(self, codec: "Codec", outputs: "Mapping[int, EngineCoreOutputs]", stats: InstanceStats) -> None:
        head = codec.encode_stats(stats)
        for client_index, batch in outputs.items():
            finished = [o.request_id for o in batch.outputs if o.finish_reason is not None]
            if finished:
                self.requests.remove(client_index, finished)
            self.server.send(self._addressee(client_index, batch), [head, *codec.encode_outputs(batch)])

    def _addressee(self, client_index: int, batch: "EngineCoreOutputs") -> int:
        """The client that gets `batch`.

        vLLM addresses a step without tokens to client 0. Any connected client may take its statistics.
        """
        if batch.outputs:
            return client_index
        connected = self.server.client_indices()
        return client_index if client_index in connected else next(iter(connected), client_index)

    # In, in the channel's thread ------------------------------------------------------------------------------

    def welcome(self) -> Sequence[Buffer]:
        """Parts of the WELCOME frame."""
        from pengserve.replicas.engine.wire import Welcome

        return [msgspec.msgpack.encode(Welcome(self._key, self._lanes().capacity, self._newest_stats()))]

    def heartbeat(self) -> Sequence[Buffer]:
        """Parts of an empty BATCH. What waits at the gate is looked after as often, also where no step is made."""
        from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs

        assert self._codec is not None
        if self.gate.is_closed:
            self._submit(self._tend_gate)
        return [self._codec.encode_stats(self._newest_stats()), *self._codec.encode_outputs(EngineCoreOutputs())]

    def _tend_gate(self) -> None:
        self.gate.tend()
        self._note_idle()

    def on_frame(self, client_index: int, frame: Frame) -> None:
        """Takes an ADD, ABORT or REORDER."""
        try:
            if frame.kind is FrameKind.ADD:
                self._add(client_index, frame.parts)
            elif frame.kind is FrameKind.ABORT:
                self._abort(client_index, msgspec.msgpack.decode(frame.parts[0], type=list[str]))
            elif frame.kind is FrameKind.REORDER:
                self._reorder(client_index, frame.parts[0])
            else:
                raise LinkLostError(f"an ingress sent a {frame.kind.name} frame")
        except (msgspec.MsgspecError, IndexError) as error:
            raise LinkLostError("an ingress sent what cannot be decoded") from error

    def on_lost(self, client_index: int) -> None:
        """An ingress is gone: its requests have no reader."""
        request_ids = self.requests.remove_client(client_index)
        if request_ids:
            logger.info("instance %s: a client left; aborting its %d requests", self._key, len(request_ids))
            self._submit_abort(request_ids)

    def _add(self, client_index: int, parts: Sequence[Buffer]) -> None:
        assert self._codec is not None
        lanes, add = self._lanes(), self._codec.decode_add(parts)
        add.request.client_index = client_index
        request_id, is_tried_alone = add.request.request_id, add.is_tried_alone
        self.requests.add(add.request, add.contract)
        lanes.num_predicted += add.predicted_hit_tokens
        self._on_busy()

        def admit(request: "Request") -> None:
            self._submit(lambda: self.gate.take(request, is_tried_alone=is_tried_alone))

        try:
            lanes.prepare(add.request, add.output_token_ids, admit)
        except Exception:
            # The ingress has checked this request already. The error fails this request alone.
            logger.exception("instance %s cannot take request %s", self._key, request_id)
            self._refuse(client_index, request_id)

    def _abort(self, client_index: int, request_ids: list[str]) -> None:
        self.requests.remove(client_index, request_ids)
        self._submit_abort(request_ids)

    def _submit_abort(self, request_ids: list[str]) -> None:
        def abort() -> None:
            self._lanes().abort(request_ids)
            self.gate.forget(request_ids)
            self.deposits.forget(request_ids)
            self._note_idle()

        self._submit(abort)

    def _reorder(self, client_index: int, part: Buffer) -> None:
        from pengserve.replicas.engine.wire import Reorder

        orders = msgspec.msgpack.decode(part, type=Reorder).orders
        self.requests.reorder(client_index, orders)
        lanes = self._lanes()
        by_id = {request_id: (priority, arrival_time) for request_id, priority, arrival_time in orders}
        self._submit(lambda: lanes.reorder(by_id))
