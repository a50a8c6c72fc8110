"""What members send each other in one process: each is a thread, and a queue stands for each direction."""

import queue
from types import SimpleNamespace
from typing import Any

import torch

from pengserve.replicas.comm.communicator import Move

TIMEOUT_S = 60.0


class ThreadExchange:
    """The communicators of one group, of which only `exchange` is asked for."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = {}

    def communicator(self, rank: int) -> Any:
        """The member's own."""
        return SimpleNamespace(members=(), exchange=lambda moves: self._exchange(rank, moves))

    def _exchange(self, rank: int, moves: list[Move]) -> None:
        """As the communicators do it."""
        for move in moves:
            if move.src == rank:
                self._queue(rank, move.dst).put(move.tensor.clone())
        for move in moves:
            if move.dst == rank:
                move.tensor.copy_(self._queue(move.src, rank).get(timeout=TIMEOUT_S))

    def _queue(self, src: int, dst: int) -> "queue.SimpleQueue[torch.Tensor]":
        # A defaultdict can hand two threads two queues for one key, where a garbage collection comes between.
        return self._sent.setdefault((src, dst), queue.SimpleQueue())
