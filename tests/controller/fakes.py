"""A cluster in memory, behind the controller's port. The port to real Ray has its own test."""

import asyncio
from dataclasses import dataclass, replace

from pengserve.controller.ports import Discovery
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.snapshot import DeviceInfo, InstanceSnapshot, InstanceState, KvCapacity

CAPACITY = KvCapacity(
    num_blocks=64, block_size=32, bytes_per_block=4096, max_model_len=1024, max_num_seqs=8, weight_bytes=1 << 20
)


def life(instance_id: int, incarnation: int = 1) -> InstanceKey:
    """A key, for short."""
    return InstanceKey(instance_id=InstanceId(instance_id), incarnation=incarnation)


def answer(key: InstanceKey, state: InstanceState, failure: str = "") -> InstanceSnapshot:
    """What an instance in `state` says of itself."""
    serving = state in (InstanceState.READY, InstanceState.DRAINING)
    return InstanceSnapshot(
        key=key,
        state=state,
        endpoint=f"127.0.0.1:{20000 + 1000 * key.instance_id + key.incarnation}" if serving else "",
        device=DeviceInfo(node_id="n0", device=f"cuda:{key.instance_id}"),
        capacity=CAPACITY if serving else None,
        failure=failure,
    )


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeInstance:
    """One process of the fake cluster."""

    said: InstanceSnapshot
    silent: bool = False
    stays_busy: bool = False  # a drain never finishes


class FakePort:
    """`ReplicaPort` over a dictionary; outlives controllers as a cluster does."""

    def __init__(self) -> None:
        self.instances: dict[InstanceKey, FakeInstance] = {}
        self.reserved: set[InstanceKey] = set()  # as placement groups: freed by a kill alone
        self.refusal = ""  # why nothing can be created
        self.starts_ready = True
        self.created: list[InstanceKey] = []  # the newest life of each slot is known to the cluster for ever
        self.silence = asyncio.Event()  # never set

    async def create(self, key: InstanceKey) -> None:
        if self.refusal:
            raise EngineError(self.refusal)
        others = [k for k in self.instances if k.instance_id == key.instance_id]
        assert not others, f"slot {key.instance_id} would have two lives: {others} and {key}"
        state = InstanceState.READY if self.starts_ready else InstanceState.STARTING
        self.instances[key] = FakeInstance(answer(key, state))
        self.reserved.add(key)
        self.created.append(key)

    async def status(self, key: InstanceKey) -> InstanceSnapshot:
        instance = self._instance(key)
        if instance.silent:
            await self.silence.wait()
        return instance.said

    async def drain(self, key: InstanceKey, timeout_s: float) -> bool:
        instance = self._instance(key)
        instance.said = replace(instance.said, state=InstanceState.DRAINING)
        return not instance.stays_busy

    async def kill(self, key: InstanceKey) -> None:
        self.instances.pop(key, None)
        self.reserved.discard(key)

    async def discover(self) -> Discovery:
        living = set(self.instances)
        return Discovery(
            living=tuple(sorted(living)), leftovers=tuple(sorted(self.reserved - living)), newest=tuple(self.created)
        )

    def crash(self, key: InstanceKey) -> None:
        """SIGKILL: the process is gone, its reservation is not."""
        del self.instances[key]

    def fail(self, key: InstanceKey, why: str) -> None:
        """The engine fails, the process lives."""
        self.instances[key].said = answer(key, InstanceState.DEAD, why)

    def _instance(self, key: InstanceKey) -> FakeInstance:
        if key not in self.instances:
            raise EngineError("its process has ended")
        return self.instances[key]
