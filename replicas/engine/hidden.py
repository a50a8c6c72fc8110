"""What a stage hands on to the next one: hidden states of a microbatch, as parts of a peer message."""

import queue
import time
from collections.abc import Sequence

import torch
from torch import nn

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.vllm_seam import IntermediateTensors


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


class HiddenCodec:
    """Between vLLM's `IntermediateTensors` and bytes; tensors by name, `[tokens, hidden size]` each."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        one = model.make_empty_intermediate_tensors(batch_size=1, dtype=next(model.parameters()).dtype, device="cpu")
        self._names = sorted(one.tensors)
        self._sizes = {name: one.tensors[name].shape[1:] for name in self._names}
        self._dtype = one.tensors[self._names[0]].dtype
        self._device = device

    def encode(self, hidden: IntermediateTensors) -> list[Buffer]:
        """One part a tensor, in the order of names."""
        return [_bytes(hidden.tensors[name]) for name in self._names]

    def decode(self, parts: Sequence[Buffer], num_tokens: int) -> IntermediateTensors:
        """Inverse of `encode`.

        Raises:
            EngineError: it is of another microbatch.
        """
        tensors = {}
        for name, part in zip(self._names, parts, strict=True):
            flat = torch.frombuffer(part, dtype=self._dtype)
            if flat.numel() != num_tokens * self._sizes[name].numel():
                raise EngineError(f"{name} of {flat.numel()} elements came for {num_tokens} tokens")
            tensors[name] = flat.view(num_tokens, *self._sizes[name]).to(self._device)
        return IntermediateTensors(tensors)


def _bytes(tensor: torch.Tensor) -> Buffer:
    flat = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())
