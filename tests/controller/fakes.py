"""A cluster in memory, behind the controller's port. The port to real Ray has its own test."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pengserve.controller.ports import Discovery, StatusCall
from pengserve.controller.terms import LocalTermStore
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.errors import EngineError, FenceError, StepError
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey, Version
from pengserve.planners.types.orders import RequestOrder
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import (
    DeviceInfo,
    InstanceSnapshot,
    InstanceState,
    InstanceStats,
    KvCapacity,
    LaneInfo,
)

FIRST = Version(term=1, counter=0)
"""Of the first controller there is."""

CAPACITY = KvCapacity(
    num_blocks=64, block_size=32, bytes_per_block=4096, max_model_len=1024, max_num_seqs=8, weight_bytes=1 << 20
)


def life(instance_id: int, incarnation: int = 1) -> InstanceKey:
    """A key, for short."""
    return InstanceKey(instance_id=InstanceId(instance_id), incarnation=incarnation)


def lanes(degrees: Sequence[int], max_stages: int = 1) -> tuple[LaneInfo, ...]:
    """The shapes an instance can run; a tp group holds requests that are longer by its degree, a pipeline has room."""
    wide = [replace(CAPACITY, block_size=32 * p, max_model_len=1024 * p) for p in (1, *degrees)]
    tp = tuple(LaneInfo(shape="dp" if c == CAPACITY else f"tp{c.block_size // 32}", capacity=c) for c in wide)
    weight_blocks = CAPACITY.weight_bytes // CAPACITY.bytes_per_block
    stages = [s for s in (2, 4, 8) if s <= max_stages]
    blocks = [s * CAPACITY.num_blocks + (s - 1) * weight_blocks for s in stages]
    return tp + tuple(
        LaneInfo(shape=f"pp{s}", capacity=replace(CAPACITY, num_blocks=n, max_model_len=32 * n))
        for s, n in zip(stages, blocks, strict=True)
    )


def answer(
    key: InstanceKey,
    state: InstanceState,
    failure: str = "",
    degrees: Sequence[int] = (),
    max_stages: int = 1,
) -> InstanceSnapshot:
    """What an instance in `state` says of itself."""
    serving = state in (InstanceState.READY, InstanceState.DRAINING)
    is_elastic = bool(degrees) or max_stages > 1
    return InstanceSnapshot(
        key=key,
        state=state,
        endpoint=f"127.0.0.1:{20000 + 1000 * key.instance_id + key.incarnation}" if serving else "",
        device=DeviceInfo(node_id="n0", device=f"cuda:{key.instance_id}"),
        capacity=CAPACITY if serving else None,
        failure=failure,
        lanes=lanes(degrees, max_stages) if serving and is_elastic else (),
        peer_endpoint=f"127.0.0.1:{30000 + 1000 * key.instance_id + key.incarnation}" if serving and is_elastic else "",
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
    refusal: str = ""  # why it takes part in no switch
    deaf_to: set[str] = field(default_factory=set)  # calls it never answers
    broken: set[str] = field(default_factory=set)  # names of groups that cannot be built
    prepared: SwitchPlan | None = None
    waits_to_drain: bool = False  # a drain ends when `drained` is set
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    orders: list[RequestOrder] = field(default_factory=list)
    directories: list[PeerDirectory] = field(default_factory=list)


class FakePort:
    """`ReplicaPort` over a dictionary; outlives controllers as a cluster does. Switches happen as they should."""

    def __init__(self, degrees: Sequence[int] = (), max_stages: int = 1) -> None:
        self.degrees, self.max_stages = degrees, max_stages
        self.terms = LocalTermStore()  # as the instances, it outlives controllers
        self.instances: dict[InstanceKey, FakeInstance] = {}
        self.reserved: set[InstanceKey] = set()  # as placement groups: freed by a kill alone
        self.outgoing: set[InstanceKey] = set()  # lives of another configuration
        self.refusal = ""  # why nothing can be created
        self.starts_ready = True
        self.created: list[InstanceKey] = []  # the newest life of each slot is known to the cluster for ever
        self.silence = asyncio.Event()  # never set
        self.answer_at_once = False
        self.calls: list[tuple[str, InstanceKey, str]] = []  # of switches: the call, whom, which plan
        self.may_prepare = asyncio.Event()
        self.may_prepare.set()
        self.in_commit = asyncio.Event()  # a leader has begun a commit
        self.may_commit = asyncio.Event()  # ... and may end it
        self.may_commit.set()
        self.commit_error = ""  # why leaders refuse

    async def create(self, key: InstanceKey) -> None:
        if self.refusal:
            raise EngineError(self.refusal)
        others = [k for k in self.instances if k.instance_id == key.instance_id and k not in self.outgoing]
        assert not others, f"slot {key.instance_id} would have two lives: {others} and {key}"
        state = InstanceState.READY if self.starts_ready else InstanceState.STARTING
        self.instances[key] = FakeInstance(answer(key, state, degrees=self.degrees, max_stages=self.max_stages))
        self.reserved.add(key)
        self.created.append(key)

    async def status(self, key: InstanceKey) -> InstanceSnapshot:
        instance = self._instance(key)
        if instance.silent:
            await self.silence.wait()
        return instance.said

    def statuses(self, keys: Sequence[InstanceKey]) -> list[InstanceSnapshot | StatusCall]:
        """All calls; or, where they `answer_at_once`, what those of the living say that are not silent."""
        found: list[InstanceSnapshot | StatusCall] = []
        for key in keys:
            instance = self.instances.get(key)
            is_here = self.answer_at_once and instance is not None and not instance.silent
            found.append(self._instance(key).said if is_here else self.status(key))
        return found

    async def drain(self, key: InstanceKey, timeout_s: float) -> bool:
        instance = self._instance(key)
        instance.said = replace(instance.said, state=InstanceState.DRAINING)
        if instance.waits_to_drain:
            await instance.drained.wait()
        return not instance.stays_busy

    async def retire(self, key: InstanceKey, timeout_s: float) -> bool:
        if self._instance(key).stays_busy:
            await asyncio.sleep(timeout_s)
        return not self._instance(key).stays_busy

    async def connect(self, key: InstanceKey, directory: PeerDirectory) -> None:
        instance = self._instance(key)
        await self._hear("connect", instance)
        instance.directories.append(directory)
        mine = [spec.name for spec in directory.groups if key in spec.members]
        ready = tuple(name for name in mine if name not in instance.broken)
        failed = tuple(name for name in mine if name in instance.broken)
        instance.said = replace(instance.said, groups_ready=ready, groups_failed=failed)

    async def prepare(self, key: InstanceKey, plan: SwitchPlan) -> None:
        self.calls.append(("prepare", key, plan.plan_id))
        instance = self._instance(key)
        await self._hear("prepare", instance)
        await self.may_prepare.wait()
        if plan.epoch < instance.said.epoch:
            raise FenceError(f"epoch {plan.epoch} is older than {instance.said.epoch}")
        if instance.refusal:
            raise StepError(instance.refusal)
        instance.prepared = plan

    async def commit(self, key: InstanceKey, plan: SwitchPlan) -> SwitchReport:
        self.calls.append(("commit", key, plan.plan_id))
        leader = self._instance(key)
        assert key == plan.leader, "the leader alone commits"
        self.in_commit.set()
        await self.may_commit.wait()
        if self.commit_error:
            raise StepError(self.commit_error)
        self.switch(plan)
        await self._hear("commit", leader)
        return SwitchReport(plan_id=plan.plan_id, epoch=Epoch(plan.epoch + 1), cutover_s=0.01, num_carried=3)

    async def abort(self, key: InstanceKey, plan_id: str) -> None:
        self.calls.append(("abort", key, plan_id))
        instance = self._instance(key)
        await self._hear("abort", instance)
        instance.prepared = None

    async def order(self, key: InstanceKey, orders: Sequence[RequestOrder]) -> None:
        instance = self._instance(key)
        await self._hear("order", instance)
        instance.orders += orders

    def switch(self, plan: SwitchPlan) -> None:
        """All members run the plan's shape from now on."""
        for key in plan.members:
            instance = self._instance(key)
            assert instance.prepared == plan, "nothing is committed that was not prepared"
            instance.prepared = None
            part = plan.part_of(key)
            lane = str(plan.group) if plan.is_merge else str(part) if part.degree > 1 else "dp"
            instance.said = replace(instance.said, lane=lane, epoch=Epoch(plan.epoch + 1))

    def carry(self, key: InstanceKey, num_blocks: int) -> None:
        """A leader holds so many blocks of KV now, and what is beyond its shape waits."""
        instance = self.instances[key]
        shape = instance.said.lane.partition("@")[0]
        lane = next(lane.capacity for lane in instance.said.lanes if lane.shape == shape)
        assert lane is not None
        used = min(num_blocks, lane.num_blocks)
        stats = InstanceStats(
            shape=shape,
            num_running=4,
            num_waiting=4 * (used < num_blocks),
            kv_blocks_used=used,
            kv_blocks_total=lane.num_blocks,
            block_size=lane.block_size,
            queued_tokens=(num_blocks - used) * lane.block_size,
        )
        instance.said = replace(instance.said, stats=stats)

    def fall_back(self, key: InstanceKey) -> None:
        """A survivor of a broken group goes on alone."""
        instance = self.instances[key]
        instance.said = replace(instance.said, lane="dp")

    async def kill(self, key: InstanceKey) -> None:
        self.instances.pop(key, None)
        self.reserved.discard(key)

    async def discover(self) -> Discovery:
        living = set(self.instances)
        return Discovery(
            living=tuple(sorted(living - self.outgoing)),
            outgoing=tuple(sorted(living & self.outgoing)),
            leftovers=tuple(sorted(self.reserved - living)),
            newest=tuple(self.created),
        )

    def crash(self, key: InstanceKey) -> None:
        """SIGKILL: the process is gone, its reservation is not."""
        del self.instances[key]

    def fail(self, key: InstanceKey, why: str) -> None:
        """The engine fails, the process lives."""
        self.instances[key].said = answer(key, InstanceState.DEAD, why)

    async def _hear(self, call: str, instance: FakeInstance) -> None:
        if call in instance.deaf_to:
            await self.silence.wait()

    def _instance(self, key: InstanceKey) -> FakeInstance:
        if key not in self.instances:
            raise EngineError("its process has ended")
        return self.instances[key]
