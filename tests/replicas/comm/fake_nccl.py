"""`ProcessGroupNCCL` without a GPU: gloo carries the bytes, and what the real one demands or withholds is kept.

rule of NCCL in torch                                           here
a call orders streams; `wait` raises nothing for a dead peer    `wait` returns when the bytes are there, or on abort
a kernel whose peer is gone spins until the group is aborted    `wait` blocks until `abort`
sends and receives at once are coalesced between two calls      outside them, two in one go are refused
these two calls take a device; a `Work` has none                checked
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

MAX_SPIN_S = 30.0  # a test that hangs so long has failed


class FakeWork:
    """What a call returns: it has `wait` and no device."""

    def __init__(self, group: "FakeNccl", works: list[Any]) -> None:
        self._group, self._works = group, works
        self._is_done = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def is_completed(self) -> bool:
        return self._is_done.is_set()

    def _watch(self) -> None:
        """Completes in the background, as a kernel does: whether it is waited for or not."""
        with contextlib.suppress(RuntimeError):  # gloo notices that the peer is gone; a kernel does not
            for work in self._works:
                work.wait()
            self._is_done.set()

    def wait(self) -> bool:
        end_s = time.monotonic() + MAX_SPIN_S
        while not self._is_done.is_set() and not self._group.aborted.wait(0.001):
            if time.monotonic() > end_s:
                raise AssertionError("this call would never have ended")
        return True


class FakeNccl:
    """One member's group."""

    class Options:
        """As `ProcessGroupNCCL.Options`, as far as it is used."""

        def __init__(self) -> None:
            self._timeout: Any = None
            self.config = SimpleNamespace(blocking=1)

    def __init__(self, store: dist.Store, rank: int, size: int, options: "FakeNccl.Options") -> None:
        assert options.config.blocking == 0, "a blocking communicator cannot be aborted"
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout, gloo._threads = options._timeout, 1
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo = dist.ProcessGroupGloo(store, rank, size, gloo)
        self.aborted = threading.Event()
        self.is_connected = False
        self._coalesced: list[Any] | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert isinstance(device, torch.device)
        self.is_connected = True

    def _start_coalescing(self, device: torch.device) -> None:
        assert isinstance(device, torch.device) and self._coalesced is None
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> FakeWork:
        assert isinstance(device, torch.device) and self._coalesced is not None
        works, self._coalesced = self._coalesced, None
        return FakeWork(self, works)

    def allreduce(self, tensors: list[torch.Tensor]) -> FakeWork:
        return self._collective(lambda: self._gloo.allreduce(tensors))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> FakeWork:
        return self._collective(lambda: self._gloo.allgather(outputs, inputs))

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> FakeWork:
        return self._collective(lambda: self._gloo.broadcast(tensors, options))

    def barrier(self) -> FakeWork:
        return self._collective(lambda: self._gloo.barrier())

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> FakeWork | None:
        return self._point_to_point(self._gloo.send(tensors, dst, tag))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> FakeWork | None:
        return self._point_to_point(self._gloo.recv(tensors, src, tag))

    def abort(self) -> None:
        self.aborted.set()

    def _collective(self, call: Any) -> FakeWork:
        assert self.is_connected and self._coalesced is None
        if self.aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        works: list[Any] = []
        with contextlib.suppress(RuntimeError):  # the peer is gone: the kernel is launched all the same
            works.append(call())
        return FakeWork(self, works or [_NeverDone()])

    def _point_to_point(self, work: Any) -> FakeWork | None:
        assert self.is_connected
        if self._coalesced is None:
            return FakeWork(self, [work])
        self._coalesced.append(work)
        return None


class RefusingNccl(FakeNccl):
    """Two members are on one device: NCCL says so in the first call, not when it connects."""

    def allreduce(self, tensors: list[torch.Tensor]) -> FakeWork:
        raise RuntimeError("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60")


class SilentNccl(FakeNccl):
    """The members never come together."""

    def allreduce(self, tensors: list[torch.Tensor]) -> FakeWork:
        return FakeWork(self, [_NeverDone()])


class _NeverDone:
    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        raise RuntimeError("the peer is gone")


@contextlib.contextmanager
def nccl_is_there(kind: type[FakeNccl] = FakeNccl) -> Iterator[None]:
    """While open, torch has a `ProcessGroupNCCL`: this one."""
    before = getattr(dist, "ProcessGroupNCCL", None)
    dist.ProcessGroupNCCL = kind
    try:
        yield
    finally:
        if before is None:
            del dist.ProcessGroupNCCL
        else:
            dist.ProcessGroupNCCL = before
