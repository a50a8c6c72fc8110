"""What the parts of channel frames hold, as msgpack. No pickle: vLLM's encoder refuses what it cannot name."""

from collections.abc import Sequence

import msgspec

from pengserve.planners.types.contract import Contract
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.snapshot import InstanceStats, KvCapacity
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs, EngineCoreRequest, MsgpackDecoder, MsgpackEncoder

_COPY = "~"


class AddRequest(msgspec.Struct, array_like=True):
    """A request, and what another instance had already generated for it."""

    request: EngineCoreRequest
    output_token_ids: list[int]
    is_tried_alone: bool = False  # it may kill instances: see `replicas.trial_gate`
    predicted_hit_tokens: int = 0  # of its prompt, that the ingress expects in the instance's prefix cache
    contract: Contract | None = None  # None: `NO_CONTRACT`


def copy_id(request_id: str, number: int) -> str:
    """The id under which a request is sent for the second, third, ... time: no client may use the sign in its own."""
    return f"{request_id}{_COPY}{number}"


def is_copy(wire_id: str) -> bool:
    """Whether a request was sent before, to this or another instance."""
    return _COPY in wire_id


class Welcome(msgspec.Struct):
    """First frame of an instance after the handshake: which instance this is, what it holds, and its load."""

    key: InstanceKey
    capacity: KvCapacity
    stats: InstanceStats = InstanceStats()


class Moved(msgspec.Struct, array_like=True):
    """These requests are no longer here; nothing more comes for them over this link. A MOVED frame's only part.

    carried: `to` goes on with them where they were, and their next tokens come over the link to `to`.
    not carried: the client must send them again, with the tokens received; to `to`, where it is named.
    """

    request_ids: list[str]
    to: InstanceKey | None
    carried: bool


class Reorder(msgspec.Struct, array_like=True):
    """Requests have another place in the scheduler's order by priority: the least priority first, then arrival.

    A REORDER frame's only part. Requests that are not here are left alone.
    """

    orders: list[tuple[str, int, float]]  # (request id, priority, arrival_time)


class Trial(msgspec.Struct, array_like=True):
    """A request that is to be tried alone was let in. A TRIAL frame's only part, sent before its first step.

    is_alone: from now on a death of the instance is its doing. Else it is among others, from the start or again.
    """

    request_id: str
    is_alone: bool


class Paused(msgspec.Struct, array_like=True):
    """A request was parked for so long, and goes on. A PAUSED frame's only part."""

    request_id: str
    seconds: float
    swapped_bytes: int = 0  # of its KV, copied between device and host meanwhile


class StepBatch(msgspec.Struct):
    """All that one engine step made for one ingress, and the load after it."""

    outputs: EngineCoreOutputs
    stats: InstanceStats


class Codec:
    """Encoders and decoders of one thread (vLLM's keep buffers, so they are not shared)."""

    def __init__(self) -> None:
        self._encoder = MsgpackEncoder()
        self._plain = msgspec.msgpack.Encoder()
        self._add_decoder = MsgpackDecoder(AddRequest)
        self._outputs_decoder = MsgpackDecoder(EngineCoreOutputs)
        self._stats_decoder = msgspec.msgpack.Decoder(InstanceStats)

    def encode_add(self, add: AddRequest) -> Sequence[Buffer]:
        """Parts of an ADD frame."""
        return self._encoder.encode(add)

    def decode_add(self, parts: Sequence[Buffer]) -> AddRequest:
        """Inverse of `encode_add`. Raises msgspec.MsgspecError on what is no request."""
        return self._add_decoder.decode(parts)

    def encode_stats(self, stats: InstanceStats) -> bytes:
        """First part of a BATCH frame; the same for every client of a step."""
        return self._plain.encode(stats)

    def encode_outputs(self, outputs: EngineCoreOutputs) -> Sequence[Buffer]:
        """The other parts of a BATCH frame."""
        return self._encoder.encode(outputs)

    def decode_batch(self, parts: Sequence[Buffer]) -> StepBatch:
        """A BATCH frame's outputs and stats."""
        return StepBatch(self._outputs_decoder.decode(parts[1:]), self._stats_decoder.decode(parts[0]))
