"""Collectives of devices by way of the host: over own TCP, for members among which NCCL cannot run.

NCCL refuses two members on one GPU, and some networks. Each call then copies its tensors to the host, makes the same
call there, and copies the result back: slow, and exact. The calls wait for the device, so no kernel is ahead of them.
"""

from collections.abc import Sequence

import torch

from pengserve.replicas.comm.communicator import Communicator, Move


class StagedCommunicator(Communicator):
    """`host` makes the calls, with tensors on the CPU; it is this object's from now on."""

    def __init__(self, host: Communicator) -> None:
        super().__init__(host.name, host.members, host.rank, host.timeout_s)
        self._host = host

    @property
    def is_broken(self) -> bool:
        return self._host.is_broken

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(self._host.all_reduce(tensor.cpu()))

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return self._host.all_gather(tensor.cpu(), dim).to(tensor.device)

    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = 0) -> torch.Tensor | None:
        found = self._host.gather(tensor.cpu(), dst, dim)
        return None if found is None else found.to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        found = self._host.broadcast(tensor.cpu(), src)
        return tensor if self.rank == src else tensor.copy_(found)

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        self._host.send(tensor.cpu(), dst, tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> torch.Tensor:
        return tensor.copy_(self._host.recv(_room(tensor), src, tag))

    def barrier(self) -> None:
        self._host.barrier()

    def exchange(self, moves: Sequence[Move]) -> None:
        mine = [move for move in moves if self.rank in (move.src, move.dst)]
        staged = [
            move._replace(tensor=move.tensor.cpu() if move.src == self.rank else _room(move.tensor)) for move in mine
        ]
        self._host.exchange(staged)
        for move, copy in zip(mine, staged, strict=True):
            if move.dst == self.rank:
                move.tensor.copy_(copy.tensor)

    def abort(self) -> None:
        self._host.abort()


def _room(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, on the host, of the form of `tensor`."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)
