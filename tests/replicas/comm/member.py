"""One member of a test's cluster as a process: commands are JSON lines on standard input, answers on standard output.

python -m tests.replicas.comm.member SLOT INCARNATION TIMEOUT_S BACKEND
"""

import hashlib
import json
import sys
import threading
import time
from typing import Any

import torch

from pengserve.planners.types.directory import GroupSpec, PeerAddress
from pengserve.planners.types.errors import PengServeError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, GroupKind
from pengserve.replicas.comm.communicator import Communicator, Move
from pengserve.replicas.comm.peers import PeerNetwork
from pengserve.replicas.comm.pool import CommunicatorPool

TOKEN = "a token"


def key_of(slot: int, incarnation: int) -> InstanceKey:
    """A key from plain numbers."""
    return InstanceKey(instance_id=InstanceId(slot), incarnation=incarnation)


def spec_of(members: list[list[int]], round_: int = 0, kind: GroupKind = GroupKind.TP) -> GroupSpec:
    """The group of these lives."""
    group = Group(kind=kind, members=tuple(InstanceId(slot) for slot, _ in members))
    return GroupSpec(group=group, members=tuple(key_of(*member) for member in members), round=round_)


class Member:
    """Answers commands; each method is one."""

    def __init__(self, key: InstanceKey, timeout_s: float, backend: str, device: str = "cpu") -> None:
        self.received: list[bytes] = []
        self.lost: list[str] = []
        self.network = PeerNetwork(
            key,
            "127.0.0.1",
            TOKEN,
            lambda key, kind, parts: self.received.append(b"".join(parts)),
            lambda key: self.lost.append(str(key)),
            timeout_s,
        )
        self.pool = CommunicatorPool(self.network, device, timeout_s, backend)

    def endpoint(self) -> str:
        return self.network.endpoint

    def connect(self, addresses: list[tuple[int, int, str]]) -> list[str]:
        self.network.connect(
            [PeerAddress(key=key_of(slot, life), endpoint=endpoint) for slot, life, endpoint in addresses], 5.0
        )
        return [str(key) for key in self.network.peers()]

    def build(self, groups: list[Any]) -> dict[str, Any]:
        start_s = time.perf_counter()
        self.pool.build([spec_of(members, round_) for members, round_ in groups])
        return {
            "ready": self.pool.ready(),
            "failed": self.pool.failed(),
            "took_s": time.perf_counter() - start_s,
        }

    def collectives(self, name: str) -> str:
        return check_collectives(self.pool.get(name))

    def reduce(self, name: str, num_calls: int = 1) -> float:
        communicator = self.pool.get(name)
        tensor = torch.ones(1024)
        for _ in range(num_calls):
            communicator.all_reduce(tensor)
        return float(tensor[0])

    def abort_soon(self, name: str) -> None:
        threading.Timer(0.3, self.pool.abort, [name]).start()

    def mark_failed(self, name: str) -> dict[str, Any]:
        self.pool.mark_failed(name)
        return {"ready": self.pool.ready(), "failed": self.pool.failed()}

    def losses(self) -> list[str]:
        return self.lost


def check_collectives(communicator: Communicator) -> str:
    """Asserts every call's result; the digest of all results, which members compare."""
    rank, size, digest = communicator.rank, communicator.size, hashlib.sha256()

    def value(of: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(of)).to(dtype)

    def note(tensor: torch.Tensor) -> None:
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())

    for shape in ((1,), (3, 5), (64, 1024), (1000, 1001), (0,)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            mine = value(rank, *shape, dtype=dtype)
            total = sum(value(r, *shape, dtype=dtype) for r in range(size))
            assert communicator.all_reduce(mine) is mine
            torch.testing.assert_close(mine, total, atol=0.1 if dtype is torch.bfloat16 else 1e-5, rtol=0.02)
            note(mine)
        for dim in (0, -1):
            joined = communicator.all_gather(value(rank, *shape), dim)
            assert torch.equal(joined, torch.cat([value(r, *shape) for r in range(size)], dim))
            note(joined)
    strided = value(rank, 6, 4).t()
    communicator.all_reduce(strided)
    note(strided)
    for root in range(size):
        gathered = communicator.gather(value(rank, 2, 3), root, 1)
        assert (gathered is None) == (rank != root)
        if gathered is not None:
            assert torch.equal(gathered, torch.cat([value(r, 2, 3) for r in range(size)], 1))
        assert torch.equal(communicator.broadcast(value(rank, 7), root), value(root, 7))
    communicator.barrier()
    if rank == 0:
        for other in range(1, size):
            communicator.send(value(other, 5), other, tag=3)
    else:
        assert torch.equal(communicator.recv(torch.empty(5), 0, tag=3), value(rank, 5))
    check_exchange(communicator)
    return digest.hexdigest()


def check_exchange(communicator: Communicator) -> None:
    """Everybody sends much to everybody at once, into rows of a tensor that is not contiguous."""
    rank, size, num_moves, num_values = communicator.rank, communicator.size, 40, 50_000
    room = torch.zeros(num_values, size * num_moves).t()
    moves = []
    for src in range(size):
        for dst in range(size):
            for i in range(num_moves if src != dst else 0):
                content = torch.full((num_values,), float(src * 1000 + dst * 100 + i))
                moves.append(Move(src, dst, content if src == rank else room[src * num_moves + i]))
    communicator.exchange(moves)
    for src in range(size):
        for i in range(num_moves if src != rank else 0):
            assert (room[src * num_moves + i] == src * 1000 + rank * 100 + i).all()


def main() -> None:
    """Answers until standard input ends."""
    slot, incarnation, timeout_s, backend = sys.argv[1:]
    torch.set_num_threads(1)
    member = Member(key_of(int(slot), int(incarnation)), float(timeout_s), backend)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        start_s = time.perf_counter()
        try:
            answer = {"result": getattr(member, name)(*arguments)}
        except PengServeError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answer["took_s"] = time.perf_counter() - start_s
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
