"""Members of a test's cluster as threads of one process: for laws that need no death."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pengserve.planners.types.directory import GroupSpec, PeerAddress
from pengserve.planners.types.layout import GroupKind
from pengserve.replicas.comm.bulk import BulkWays
from pengserve.replicas.comm.communicator import Communicator
from tests.replicas.comm.member import Member, key_of, spec_of

T = TypeVar("T")


class LocalCluster:
    """`num_members` connected members; calls run on all at once, a thread each. `cuda`: member i has device i."""

    def __init__(
        self, num_members: int, timeout_s: float = 3.0, backend: str = "direct", device_type: str = "cpu"
    ) -> None:
        devices = [f"cuda:{slot}" if device_type == "cuda" else device_type for slot in range(num_members)]
        self.members = [Member(key_of(slot, 0), timeout_s, backend, device) for slot, device in enumerate(devices)]
        self._threads = ThreadPoolExecutor(num_members)
        addresses = [PeerAddress(key=m.network.key, endpoint=m.network.endpoint) for m in self.members]
        self.all(lambda member: member.network.connect(addresses, 40.0))

    def all(self, call: Callable[[Member], T], among: Sequence[int] | None = None) -> list[T]:
        """What `call` returns for each member; the first error is raised, after all have ended."""
        members = self.members if among is None else [self.members[i] for i in among]
        futures = [self._threads.submit(call, member) for member in members]
        for future in futures:
            future.exception(timeout=60)
        return [future.result() for future in futures]

    def spec(self, *slots: int, round_: int = 0, kind: GroupKind = GroupKind.TP) -> GroupSpec:
        return spec_of([[slot, 0] for slot in slots], round_, kind)

    def ways(self, *slots: int) -> list[BulkWays | None]:
        """Of a new pipeline, by which much goes beside its steps, seen from each member in rank order."""
        spec = self.spec(*slots, kind=GroupKind.PP)
        self.all(lambda member: member.pool.build([spec]))
        assert all(self.members[slot].pool.ready() == (spec.name,) for slot in slots)
        return [self.members[slot].pool.bulk(spec.name) for slot in slots]

    def group(self, *slots: int, round_: int = 0) -> list[Communicator]:
        """A new group, seen from each member in rank order."""
        spec = self.spec(*slots, round_=round_)
        self.all(lambda member: member.pool.build([spec]))
        return [self.members[slot].pool.get(spec.name) for slot in slots]

    def on(self, communicators: Sequence[Communicator], call: Callable[[Communicator], T]) -> list[T | Exception]:
        """`call` on each member's communicator at once; results or errors."""

        def run(communicator: Communicator) -> T | Exception:
            try:
                return call(communicator)
            except Exception as error:
                return error

        return list(self._threads.map(run, communicators, timeout=60))

    def close(self) -> None:
        for member in self.members:
            member.pool.close()
            member.network.close()
        self._threads.shutdown()
