"""Collectives over a torch process group: NCCL on CUDA, and gloo for comparison on CPU.

The calls of NCCL have run over a fake that keeps its rules (`tests/replicas/comm/fake_nccl.py`), and on one GPU as a
group of one; between two GPUs not yet.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.comm.communicator import Communicator, Move, copy_back, move_buffers

# Torch watches NCCL's calls by threads of its own. By default these end the process of a member whose peer has died.
_WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # CleanUpOnly: a call that fails aborts its group, and nothing else
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nothing ends the process where a watchdog is slow
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

_POLL_S = 0.001
_POLL_PIECE_S = 5e-5


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


def nccl_group(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float, max_ctas: int = 0
) -> Any:
    """An NCCL process group outside any world, connected at once rather than at the first call.

    `max_ctas`: how many thread blocks a call of it has at most; 0: as NCCL likes.
    """
    for name, value in _WATCHDOG.items():
        os.environ.setdefault(name, value)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0  # so that `abort` can end a call that waits for a dead peer
    if max_ctas:
        options.config.max_ctas = max_ctas
    group = dist.ProcessGroupNCCL(store, rank, size, options)
    try:
        group.eager_connect_single_device(device)
        _require_connected(group, size, device, timeout_s)
    except BaseException:
        with contextlib.suppress(RuntimeError):
            group.abort()
        raise
    return group


def _require_connected(group: Any, size: int, device: torch.device, timeout_s: float) -> None:
    """Makes the first call: NCCL connects in the background, and only a call tells that it cannot.

    Raises:
        EngineError: the members have not come together within `timeout_s`.
        RuntimeError: NCCL says why it cannot, such as for two members on one device.
    """
    ones = torch.ones(1, device=device)
    work, end_s = group.allreduce([ones]), time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() > end_s:
            raise EngineError(f"NCCL has not connected {size} members within {timeout_s:g} s")
        time.sleep(_POLL_S)
    if ones.item() != size:
        raise EngineError(f"NCCL's first sum of {size} members is wrong")


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
        self._posted: deque[tuple[Any, Sequence[Move]]] = deque()  # what is under way, the oldest first

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

        if outgoing or incoming:
            self._run("exchange", lambda group: self._begin(group, outgoing, incoming))
            copy_back(moves, incoming, self.rank)

    @property
    def posts(self) -> bool:
        return isinstance(self.process_group, getattr(dist, "ProcessGroupNCCL", ()))

    def post(self, moves: Sequence[Move]) -> None:
        outgoing, incoming = move_buffers(moves, self.rank)
        assert not incoming, "what comes in is waited for: call exchange"
        self.require_whole("post")
        while self._posted and self._posted[0][0].is_completed():
            self._posted.popleft()
        try:
            [work] = self._begin(self.process_group, outgoing, [])
        except RuntimeError as error:
            self.abort()
            raise self._broken("post", error) from error
        self._posted.append((work, outgoing))

    def begin(self, moves: Sequence[Move]) -> Any:
        """Begins to make moves of contiguous tensors, and returns what `finish` waits for; it keeps them alive.

        Raises:
            EngineError: a member is gone.
        """
        self.require_whole("a piece")
        outgoing, incoming = move_buffers(moves, self.rank)
        try:
            return self._begin(self.process_group, outgoing, incoming), moves
        except RuntimeError as error:
            self.abort()
            raise self._broken("a piece", error) from error

    def finish(self, begun: Any) -> None:
        """Returns when these moves are made. Another thread that calls `abort` ends it, over NCCL at once.

        Raises:
            EngineError: a member is gone.
        """
        works, _ = begun
        try:
            for work in works:
                while self.posts and not work.is_completed() and not self._is_broken:
                    time.sleep(_POLL_PIECE_S)  # `wait` would only make the device wait
                if not self.posts:
                    work.wait()
        except RuntimeError as error:
            self.abort()
            raise self._broken("a piece", error) from error
        self.require_whole("a piece")

    def _begin(self, group: Any, outgoing: Sequence[Move], incoming: Sequence[Move]) -> list[Any]:
        """Begins all moves; with NCCL at once, as one piece of work."""
        device = [*outgoing, *incoming][0].tensor.device
        if self.posts:
            group._start_coalescing(device)
        works = [group.recv([move.tensor], move.src, 0) for move in incoming]
        works += [group.send([move.tensor], move.dst, 0) for move in outgoing]
        return [group._end_coalescing(device)] if self.posts else works

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
