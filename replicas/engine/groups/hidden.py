"""What a stage hands on to the next one: hidden states of a microbatch.

HiddenCodec     the states themselves are parts of a peer message
DeviceHidden    the message says that they come; the group's communicator brings them, from device to device

Either way the message comes when the stage before has computed them, so a stage waits in its inbox alone: there it is
interrupted when a member is gone, and its clock stands still. A compiled stage computes more rows than the microbatch
has tokens, so many as its next larger graph has. All stages have the same graphs, and vLLM's runner reads so many rows.
"""

import queue
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.comm.communicator import Communicator, Move
from pengserve.replicas.engine.vllm_seam import IntermediateTensors

_HEAD = struct.Struct(">II")  # the first part of a message: tokens of the microbatch, rows of each tensor


class HiddenInbox:
    """Hidden states that have come and are not used yet, in the order of the microbatches. Any thread puts.

    They carry the stamp of their group, so that `get` skips those of a group that failed.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[bytes, Sequence[Buffer]] | None] = queue.SimpleQueue()

    def put(self, stamp: bytes, parts: Sequence[Buffer]) -> None:
        """Takes what the stage before has sent."""
        self._queue.put((stamp, parts))

    def interrupt(self) -> None:
        """Makes a thread that waits give up: a member is gone."""
        self._queue.put(None)

    def get(self, stamp: bytes, timeout_s: float) -> Sequence[Buffer]:
        """The next microbatch's.

        Raises:
            EngineError: a member is gone, or the stage before is silent for `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                found = self._queue.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise EngineError(f"the pipeline stage before this one sent nothing for {timeout_s:g} s") from None
            if found is None:
                raise EngineError("a member of the pipeline is gone")
            if found[0] == stamp:
                return found[1]


class HiddenWay(Protocol):
    """How hidden states go from one stage to the next."""

    def encode(self, hidden: IntermediateTensors, num_tokens: int) -> list[Buffer]:
        """Hands on what so many tokens gave, once it is computed; parts of the message to the next stage."""

    def decode(self, parts: Sequence[Buffer], num_tokens: int) -> IntermediateTensors:
        """What the stage before has handed on with this message: at least one row a token.

        Raises:
            EngineError: they are of another microbatch, or a member is gone.
        """

    def require_whole(self) -> None:
        """To be called when the device has ended a step. Raises EngineError where what it read is not what was sent."""


class HiddenCodec:
    """Between vLLM's `IntermediateTensors` and bytes; tensors by name, `[rows, hidden size]` each."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        one = model.make_empty_intermediate_tensors(batch_size=1, dtype=next(model.parameters()).dtype, device="cpu")
        self._names = sorted(one.tensors)
        self._sizes = {name: one.tensors[name].shape[1:] for name in self._names}
        self.dtype = one.tensors[self._names[0]].dtype
        self.device = device

    def parts_of(self, hidden: IntermediateTensors) -> list[torch.Tensor]:
        """Its tensors, in the order of their names."""
        return [hidden.tensors[name] for name in self._names]

    def named(self, tensors: Sequence[torch.Tensor]) -> IntermediateTensors:
        """Inverse of `parts_of`."""
        return IntermediateTensors(dict(zip(self._names, tensors, strict=True)))

    def room(self, num_rows: int) -> list[torch.Tensor]:
        """Tensors of so many rows, in the order of their names."""
        return [torch.empty(num_rows, *self._sizes[name], dtype=self.dtype, device=self.device) for name in self._names]

    def encode(self, hidden: IntermediateTensors, num_tokens: int) -> list[Buffer]:
        """After the head one part a tensor, in the order of names."""
        tensors = self.parts_of(hidden)
        return [_HEAD.pack(num_tokens, len(tensors[0])), *map(_bytes, tensors)]

    def decode(self, parts: Sequence[Buffer], num_tokens: int) -> IntermediateTensors:
        """Inverse of `encode`.

        Raises:
            EngineError: it is of another microbatch.
        """
        num_rows = num_rows_of(parts[0], num_tokens)
        tensors = []
        for name, part in zip(self._names, parts[1:], strict=True):
            flat = torch.frombuffer(part, dtype=self.dtype)
            if flat.numel() != num_rows * self._sizes[name].numel():
                raise EngineError(f"{name} of {flat.numel()} elements came for {num_rows} rows")
            tensors.append(flat.view(num_rows, *self._sizes[name]).to(self.device))
        return self.named(tensors)

    def require_whole(self) -> None:
        """What came in a message is whole."""


class DeviceHidden:
    """From device to device, by the communicator of the group that runs."""

    def __init__(self, codec: HiddenCodec, communicator: Communicator, before: int, after: int) -> None:
        """`before` and `after` are the ranks of the neighbouring stages; those that there are not are never used."""
        self._codec, self._communicator, self._before, self._after = codec, communicator, before, after

    def encode(self, hidden: IntermediateTensors, num_tokens: int) -> list[Buffer]:
        """Begins to send copies: a graph writes its next result where this one is."""
        copies = [tensor.clone() for tensor in self._codec.parts_of(hidden)]
        rank = self._communicator.rank
        self._communicator.post([Move(rank, self._after, tensor) for tensor in copies])
        device = self._codec.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # of what was computed; nothing waits for a send
        self.require_whole()
        return [_HEAD.pack(num_tokens, len(copies[0]))]

    def decode(self, parts: Sequence[Buffer], num_tokens: int) -> IntermediateTensors:
        """Receives what the stage before has begun to send."""
        room = self._codec.room(num_rows_of(parts[0], num_tokens))
        self._communicator.exchange([Move(self._before, self._communicator.rank, tensor) for tensor in room])
        return self._codec.named(room)

    def require_whole(self) -> None:
        """NCCL raises nothing for a peer that is gone: a call ends when another thread aborts the group."""
        self._communicator.require_whole("a microbatch")


def order_of(runner: Any) -> bytes:
    """Of the newest step, a sign of the order in which the runner's batch has its requests: rows have no names."""
    return zlib.crc32("\0".join(runner.input_batch.req_ids).encode()).to_bytes(4)


def require_order(before: Buffer, here: bytes) -> None:
    """Both of the same microbatch, of the stage before and of this one.

    Raises:
        EngineError: they differ, so that requests have got the hidden states of others.
    """
    if bytes(before) != here:
        raise EngineError("the pipeline stage before this one has the requests of a microbatch in another order")


def num_rows_of(head: Buffer, num_tokens: int) -> int:
    """Rows of the tensors that a message brings for a microbatch of so many tokens.

    Raises:
        EngineError: it is of another microbatch.
    """
    num_sent, num_rows = _HEAD.unpack(head)
    if num_sent != num_tokens or num_rows < num_tokens:
        raise EngineError(f"hidden states of {num_sent} tokens, in {num_rows} rows, came for {num_tokens} tokens")
    return int(num_rows)


def _bytes(tensor: torch.Tensor) -> Buffer:
    flat = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())
