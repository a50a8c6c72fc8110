"""Collectives over a torch process group: NCCL on CUDA, and gloo for comparison on CPU.

The calls of NCCL have run over a fake that keeps its rules (`tests/replicas/comm/fake_nccl.py`), and on no GPU yet.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.comm.communicator import Communicator, Move, copy_back, move_buffers

# Torch watches NCCL's calls by threads of its own. By default these end the process of a member whose peer has died.
_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # CleanUpOnly: a call that fails aborts its group, and nothing else
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nothing ends the process where a watchdog is slow
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def gloo_group(store: dist.Store, rank: int, size: int, device: Any, timeout_s: float) -> Any:
    """A gloo process group outside any world. `device` is shared by all groups: it owns the thread that polls."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [device]
    options._threads = 1  # calls of one group come one after the other
    return dist.ProcessGroupGloo(store, rank, size, options)


def gloo_device(host: str) -> Any:
    """gloo's end of the network, bound to the interface of `host`."""
    return dist.ProcessGroupGloo.create_device(hostname=host)


def nccl_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """An NCCL process group outside any world, connected at once rather than at the first call."""
    for name, value in _WATCHDOG.items():
        os.environ.setdefault(name, value)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0  # so that `abort` can end a call that waits for a dead peer
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(device)
    return group


class TorchCommunicator(Communicator):
    """A process group whose failures are EngineErrors. Tensors must be on the group's device.

    With NCCL, a call returns when the device will not start the next kernel before it; errors may surface later.
    """

    def __init__(
        self, name: str, members: Sequence[InstanceKey], rank: int, timeout_s: float, process_group: Any
    ) -> None:
        super().__init__(name, members, rank, timeout_s)
        self.process_group = process_group
        self._is_broken = False

    @property
    def is_broken(self) -> bool:
        return self._is_broken

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._run("all_reduce", lambda group: [group.allreduce([tensor])])
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        data = tensor.contiguous()
        parts = [torch.empty_like(data) for _ in range(self.size)]
        self._run("all_gather", lambda group: [group.allgather([parts], [data])])
        return torch.cat(parts, dim)

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = 0) -> torch.Tensor | None:
        data = tensor.contiguous()
        moves = [Move(src, dst, data) for src in range(self.size) if src != dst and src == self.rank]
        parts = [torch.empty_like(data) for _ in range(self.size)]
        if self.rank == dst:
            parts[dst] = data
            moves = [Move(src, dst, parts[src]) for src in range(self.size) if src != dst]
        self.exchange(moves)
        return torch.cat(parts, dim) if self.rank == dst else None

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        data = tensor.contiguous()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._run("broadcast", lambda group: [group.broadcast([data], options)])
        return tensor if data is tensor else tensor.copy_(data)

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        data = tensor.contiguous()
        self._run("send", lambda group: [group.send([data], dst, tag)])

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> torch.Tensor:
        data = tensor.contiguous()
        self._run("recv", lambda group: [group.recv([data], src, tag)])
        return tensor if data is tensor else tensor.copy_(data)

    def barrier(self) -> None:
        self._run("barrier", lambda group: [group.barrier()])

    def exchange(self, moves: Sequence[Move]) -> None:
        outgoing, incoming = move_buffers(moves, self.rank)

        def post(group: Any) -> list[Any]:
            works = [group.recv([move.tensor], move.src, 0) for move in incoming]
            return works + [group.send([move.tensor], move.dst, 0) for move in outgoing]

        def post_at_once(group: Any) -> list[Any]:
            device = (outgoing or incoming)[0].tensor.device
            group._start_coalescing(device)
            post(group)
            return [group._end_coalescing(device)]

        if outgoing or incoming:
            is_nccl = isinstance(self.process_group, getattr(dist, "ProcessGroupNCCL", ()))
            self._run("exchange", post_at_once if is_nccl else post)
            copy_back(moves, incoming, self.rank)

    def abort(self) -> None:
        self._is_broken = True
        with contextlib.suppress(RuntimeError):
            self.process_group.abort()

    def _run(self, what: str, post: Callable[[Any], list[Any]]) -> None:
        self.require_whole(what)
        try:
            for work in post(self.process_group):
                work.wait()
        except RuntimeError as error:
            self.abort()
            raise self._broken(what, error) from error
        self.require_whole(what)  # NCCL raises nothing for a peer that is gone: its kernels end when the group does
