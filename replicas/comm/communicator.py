"""Collectives of one group. A failed call breaks the group for all its members; the pool builds it anew."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceKey


class Move(NamedTuple):
    """One tensor from rank `src` to rank `dst`. Only these two read `tensor`; the others may leave the move out."""

    src: int
    dst: int
    tensor: torch.Tensor


class Communicator(ABC):
    """The members of one group, in rank order, seen from one of them.

    All members make the same calls in the same order, each from one thread at a time. Results are bitwise equal on
    all members. A member that died or fell silent, and members out of step, raise EngineError naming the group; the
    group is broken then, here and at once on the other members, and every later call raises too.
    """

    def __init__(self, name: str, members: Sequence[InstanceKey], rank: int, timeout_s: float) -> None:
        self.name, self.members, self.rank, self.size = name, tuple(members), rank, len(members)
        self.timeout_s = timeout_s

    @property
    @abstractmethod
    def is_broken(self) -> bool:
        """Whether a call failed or `abort` was called."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` over the members, in rank order, in place; returns it."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Every member's `tensor`, all of one shape, joined along `dim` in rank order."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor, dst: int = 0, dim: int = 0) -> torch.Tensor | None:
        """As `all_gather`, on rank `dst` alone; None elsewhere."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites `tensor` with that of rank `src`; returns it."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Sends to one member. Sends to one member are received in the order they were made in."""

    @abstractmethod
    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> torch.Tensor:
        """Overwrites `tensor` with what `src` sent with the same tag; returns it."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every member has come here."""

    @abstractmethod
    def exchange(self, moves: Sequence[Move]) -> None:
        """Makes all moves at once, without deadlock. Members list the moves between two ranks in the same order."""

    @property
    def posts(self) -> bool:
        """Whether there is `post`: the device sends beside what it computes."""
        return False

    def post(self, moves: Sequence[Move]) -> None:
        """As `exchange` for moves of this member to others, and returns at once. The others call `exchange`.

        Tensors must stay as they are until they have been received; they are kept alive until then. Only where `posts`.
        """
        raise NotImplementedError(f"group {self.name} sends nothing by itself")

    @abstractmethod
    def abort(self) -> None:
        """Breaks the group; a thread that waits in a call raises. From any thread; idempotent, never raises."""

    def require_whole(self, what: str = "a call") -> None:
        """Raises EngineError where the group is broken: what its calls have left on the device is not to be used."""
        if self.is_broken:
            raise self._broken(what, "it was aborted, or an earlier call failed")

    def _broken(self, what: str, error: BaseException | str) -> EngineError:
        return EngineError(f"{what} of group {self.name} failed ({error}); split the group or build it anew")


def move_buffers(moves: Sequence[Move], rank: int) -> tuple[list[Move], list[Move]]:
    """What `rank` sends and receives, as contiguous tensors; a received one may be a copy (see `copy_back`)."""
    if any(move.src == move.dst for move in moves):
        raise ValueError("a move needs two ranks")
    outgoing = [move._replace(tensor=move.tensor.contiguous()) for move in moves if move.src == rank]
    incoming = [move._replace(tensor=_contiguous_room(move.tensor)) for move in moves if move.dst == rank]
    return outgoing, incoming


def copy_back(moves: Sequence[Move], incoming: Sequence[Move], rank: int) -> None:
    """Copies received tensors to where they belong, where that is not contiguous."""
    for move, received in zip((move for move in moves if move.dst == rank), incoming, strict=True):
        if received.tensor is not move.tensor:
            move.tensor.copy_(received.tensor)


def _contiguous_room(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
