"""Pieces of KV and weights between two GPUs over NCCL, beside what their device computes.

It runs on a CPU as well, over gloo (`device.py`).
"""

import queue
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from pengserve.replicas.comm.bulk import PIECE_BYTES, Landed
from tests.gpu.device import DEVICE, IS_CUDA
from tests.gpu.figures import note_figure
from tests.replicas.comm.local import LocalCluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(90),
    pytest.mark.skipif(IS_CUDA and torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

WAIT_S, COUNT = 60.0, 64


class Pair:
    """Two members in this process, a device each; announcements go by queues."""

    def __init__(self) -> None:
        self.cluster = LocalCluster(2, timeout_s=WAIT_S, backend="nccl" if IS_CUDA else "gloo", device_type=DEVICE)
        self.ways = [ways for ways in self.cluster.ways(0, 1) if ways is not None]
        assert len(self.ways) == 2, "both members connect"
        self.landed: list[queue.SimpleQueue[Landed | Exception]] = [queue.SimpleQueue() for _ in self.ways]

    def device(self, rank: int) -> torch.device:
        return torch.device("cuda", rank) if IS_CUDA else torch.device("cpu")

    def send(self, src: int, data: torch.Tensor) -> None:
        dst = 1 - src
        here = self.landed[dst].put
        self.ways[src].send(dst, data, lambda: self.ways[dst].receive(src, data.numel(), here, here))

    def wait_for_device(self, rank: int) -> None:
        """As the step thread does before memory changes hands."""
        if IS_CUDA:
            torch.cuda.synchronize(self.device(rank))

    def take(self, dst: int) -> torch.Tensor:
        found = self.landed[dst].get(timeout=WAIT_S)
        assert isinstance(found, Landed), found
        return found.take()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.cluster.close()


def test_both_send_and_wait_for_their_device_before_either_takes_a_piece(pair: Pair) -> None:
    """No call on a device may wait for a step thread: here both step threads wait for their devices."""

    def send_all(src: int) -> None:
        if IS_CUDA:
            torch.cuda.set_device(src)
        memory = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=pair.device(src))
        for number in range(16):
            pair.send(src, memory.fill_(100 * src + number))
            pair.wait_for_device(src)

    threads = [threading.Thread(target=send_all, args=[src], daemon=True) for src in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    for dst in range(2):
        for number in range(16):
            assert pair.take(dst).unique().tolist() == [100 * (1 - dst) + number]


def test_speed_of_one_way(pair: Pair) -> None:
    data = torch.zeros(PIECE_BYTES, dtype=torch.uint8, device=pair.device(0))
    taken = threading.Thread(target=lambda: [pair.take(1) for _ in range(COUNT)], daemon=True)
    taken.start()
    began_s = time.perf_counter()
    for _ in range(COUNT):
        pair.send(0, data)
    taken.join(WAIT_S)
    assert not taken.is_alive()
    pair.wait_for_device(1)
    seconds = time.perf_counter() - began_s
    note_figure(f"pieces of {PIECE_BYTES >> 20} MiB, one way", COUNT * PIECE_BYTES / seconds / 1e9, "GB/s")
