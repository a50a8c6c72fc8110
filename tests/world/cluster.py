"""The machines and Ray: processes, reservations, names and the key-value store. Outlives every controller."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from pengserve.cluster.ingress.routing.links import Connect
from pengserve.controller.ports import Discovery, StatusCall
from pengserve.controller.terms import LocalTermStore, Term
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.errors import EngineError, LinkLostError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.planners.types.orders import Migrate
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import InstanceSnapshot, InstanceState
from pengserve.replicas.engine.link import InstanceLink
from pengserve.replicas.engine.wire import Welcome
from tests.controller.fakes import CAPACITY
from tests.world.answers import Answers
from tests.world.chaos import LATENCY_S, Chaos
from tests.world.instance import ScriptedInstance, require_alive

CONTROLLERS = "controllers"  # the node that all controllers run on

T = TypeVar("T")


class WorldCluster:
    """All that controllers and ingresses share."""

    def __init__(self, chaos: Chaos, answers: Answers, *, is_elastic: bool, num_ingresses: int) -> None:
        self.num_ingresses = num_ingresses
        self.chaos, self.terms = chaos, LocalTermStore()
        self.instances: dict[InstanceKey, ScriptedInstance] = {}  # also those that were killed and cannot hear it yet
        self.reserved: set[InstanceKey] = set()  # by placement groups
        self.killed: set[InstanceKey] = set()  # known to Ray as ended
        self.newest: dict[InstanceId, InstanceKey] = {}
        self._answers, self._is_elastic = answers, is_elastic
        self._effects: set[asyncio.Task[Any]] = set()

    def find(self, key: InstanceKey) -> ScriptedInstance | None:
        """The process of that life, as Ray knows it."""
        return None if key in self.killed else self.instances.get(key)

    def newest_of(self, slot: int) -> ScriptedInstance | None:
        """The newest process of a slot that lives."""
        lives = [i for key, i in sorted(self.instances.items()) if key.instance_id == slot and i.is_alive]
        return lives[-1] if lives else None

    def living(self) -> list[ScriptedInstance]:
        """All processes that run."""
        return [instance for _, instance in sorted(self.instances.items()) if instance.is_alive]

    def create(self, key: InstanceKey) -> None:
        """Starts a process, once."""
        if key in self.reserved:
            return
        self.reserved.add(key)
        self.newest[key.instance_id] = max(key, self.newest.get(key.instance_id, key))
        if key not in self.instances:
            self.instances[key] = ScriptedInstance(
                key, f"node{key.instance_id}", self.chaos, self._answers, is_elastic=self._is_elastic
            )

    async def kill(self, key: InstanceKey) -> None:
        """Frees the reservation at once. The process ends when its node hears of it."""
        self.reserved.discard(key)
        self.killed.add(key)
        instance = self.instances.get(key)
        if instance is not None:
            self.effect(self._end(instance))

    async def _end(self, instance: ScriptedInstance) -> None:
        await self.chaos.travel(CONTROLLERS, instance.node)
        instance.die()

    def effect(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Goes on when its caller is gone, as a call that Ray has taken does."""
        task = asyncio.get_running_loop().create_task(work)
        self._effects.add(task)
        task.add_done_callback(self._effects.discard)
        return task

    def connector(self, ingress: str) -> Connect:
        """How that ingress opens channels."""

        async def connect(
            endpoint: str, *, token: str, client_id: str, fingerprint: str, timeout_s: float
        ) -> InstanceLink:
            self.chaos.reach("ingress.connect")
            node, _, _ = endpoint.partition(":")
            try:
                async with asyncio.timeout(timeout_s):
                    await self.chaos.travel(ingress, node)
                    instance = self._listener(endpoint)
                    if instance is None:
                        raise LinkLostError(f"no process listens at {endpoint}")
                    await instance.may_run()
                    await asyncio.sleep(LATENCY_S)
            except TimeoutError:
                raise LinkLostError(f"no answer from {endpoint}") from None
            if self._listener(endpoint) is not instance:
                raise LinkLostError(f"{endpoint} closed the channel")
            end = instance.accept((ingress, node), client_id)
            welcome = Welcome(key=instance.key, capacity=CAPACITY)
            return InstanceLink(end.ingress_reader, end.ingress_end, welcome)  # type: ignore[arg-type]

        return connect

    def _listener(self, endpoint: str) -> ScriptedInstance | None:
        serving = (InstanceState.READY, InstanceState.DRAINING)
        found = [i for i in self.living() if i.endpoint == endpoint and i.state in serving]
        return found[-1] if found else None


class WorldTermStore:
    """The `TermStore` in Ray's key-value store, over the network."""

    def __init__(self, cluster: WorldCluster) -> None:
        self._cluster = cluster

    async def claim(self, above: int) -> int:
        await self._cluster.chaos.ray()
        self._cluster.chaos.reach("terms.claim")
        return await self._cluster.terms.claim(above)

    async def newest(self) -> int:
        found = await self._cluster.terms.newest()
        await self._cluster.chaos.ray()  # stale when it comes
        self._cluster.chaos.reach("terms.newest")
        return found

    async def live(self, sign: str) -> None:
        await self._cluster.chaos.ray()
        await self._cluster.terms.live(sign)

    async def sign_of_life(self) -> str:
        found = await self._cluster.terms.sign_of_life()
        await self._cluster.chaos.ray()
        return found


class WorldPort:
    """One controller's `ReplicaPort`."""

    def __init__(self, cluster: WorldCluster, term: Term) -> None:
        self._cluster, self._chaos, self._term = cluster, cluster.chaos, term

    async def create(self, key: InstanceKey) -> None:
        self._chaos.reach("port.create")

        async def create() -> None:
            await self._chaos.ray()
            self._cluster.create(key)

        await asyncio.shield(self._cluster.effect(create()))
        self._chaos.reach("port.created")

    async def status(self, key: InstanceKey) -> InstanceSnapshot:
        self._chaos.reach("port.status")
        instance = await self._reach(key)
        said = instance.status(self._term.number)
        await self._chaos.ray()  # stale when it comes
        return said

    def statuses(self, keys: Sequence[InstanceKey]) -> Sequence[InstanceSnapshot | StatusCall]:
        self._chaos.reach("port.statuses")
        return [self.status(key) for key in keys]

    async def drain(self, key: InstanceKey, timeout_s: float) -> bool:
        self._chaos.reach("port.drain")
        return await (await self._reach(key)).drain(timeout_s, self._term.number)

    async def retire(self, key: InstanceKey, timeout_s: float) -> bool:
        raise AssertionError("all worlds have one configuration")

    async def connect(self, key: InstanceKey, directory: PeerDirectory) -> None:
        self._chaos.reach("port.connect")
        (await self._reach(key)).connect(directory, self._term.number)

    async def prepare(self, key: InstanceKey, plan: SwitchPlan) -> None:
        self._chaos.reach("port.prepare")
        (await self._reach(key)).prepare(plan, self._term.number)

    async def commit(self, key: InstanceKey, plan: SwitchPlan) -> SwitchReport:
        self._chaos.reach("port.commit")
        leader = await self._reach(key)
        commit = self._cluster.effect(leader.commit(plan, self._term.number, self._cluster.find))
        report = await asyncio.shield(commit)
        await self._chaos.ray()
        return report

    async def order(self, key: InstanceKey, orders: Sequence[Migrate]) -> None:
        """Instances of this world keep their requests."""

    async def abort(self, key: InstanceKey, plan_id: str) -> None:
        self._chaos.reach("port.abort")
        (await self._reach(key)).abort(plan_id, self._term.number)

    async def kill(self, key: InstanceKey) -> None:
        self._chaos.reach("port.kill")

        async def kill() -> None:
            await self._chaos.ray()
            await self._cluster.kill(key)

        await asyncio.shield(self._cluster.effect(kill()))
        self._chaos.reach("port.killed")

    async def discover(self) -> Discovery:
        self._chaos.reach("port.discover")
        living = {key for key, i in self._cluster.instances.items() if i.is_alive and key not in self._cluster.killed}
        found = Discovery(
            living=tuple(sorted(living)),
            leftovers=tuple(sorted(self._cluster.reserved - living)),
            newest=tuple(sorted(self._cluster.newest.values())),
        )
        await self._chaos.ray()  # stale when it comes
        return found

    async def _reach(self, key: InstanceKey) -> ScriptedInstance:
        """The instance, once the call has reached its process; raises EngineError where that has ended."""
        instance = require_alive(self._cluster.find(key))
        while True:
            await self._chaos.travel(CONTROLLERS, instance.node)
            await instance.may_run()
            if not self._chaos.heals_at_s(CONTROLLERS, instance.node):
                break
        if self._cluster.find(key) is None:
            raise EngineError("its process was killed")
        return require_alive(instance)
