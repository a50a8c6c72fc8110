"""The controller's port to a simulated cluster: `controller.ports.ReplicaPort` in virtual time."""

from collections.abc import Sequence

from pengserve.controller.ports import Discovery, StatusCall
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.orders import RequestOrder
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import InstanceSnapshot, InstanceState
from pengserve.simulator.engine.cluster import SimCluster

# Above so many instances, what one says of itself is as of its last event: a few steps ago, where all of them decode.
MOST_EXACT = 64


class SimPort:
    """Answers at once; what takes time in the real world takes virtual time here."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster

    async def create(self, key: InstanceKey) -> None:
        """Starts a simulated instance. One that replaces another is ready after its start in virtual time."""
        self._cluster.create(key)

    async def status(self, key: InstanceKey) -> InstanceSnapshot:
        """The instance's view of itself, at once. Raises EngineError where it has ended."""
        return self._said(key)

    def statuses(self, keys: Sequence[InstanceKey]) -> list[InstanceSnapshot | StatusCall]:
        """Answers for all `keys` that live, at once; for the others a call that raises EngineError."""
        return [self._said(key) if self._cluster.lives(key) else self.status(key) for key in keys]

    async def drain(self, key: InstanceKey, timeout_s: float) -> bool:
        """Marks the instance as draining, at once; True where it holds no request. Raises EngineError."""
        instance = self._cluster.find(key)
        instance.state = InstanceState.DRAINING
        return not instance.requests()

    async def retire(self, key: InstanceKey, timeout_s: float) -> bool:
        """True where the instance holds no request; a simulation has one configuration. Raises EngineError."""
        return not self._cluster.find(key).requests()

    async def connect(self, key: InstanceKey, directory: PeerDirectory) -> None:
        """Gives the instance the directory of its peers. Its groups are ready at once. Raises EngineError."""
        self._cluster.connect(key, directory)

    async def prepare(self, key: InstanceKey, plan: SwitchPlan) -> None:
        """Checks whether a member can take part in `plan`. Raises StepError, FenceError, EngineError."""
        self._cluster.prepare(key, plan)

    async def commit(self, key: InstanceKey, plan: SwitchPlan) -> SwitchReport:
        """Carries out a prepared plan in virtual time. Raises StepError, EngineError."""
        return await self._cluster.commit(key, plan)

    async def abort(self, key: InstanceKey, plan_id: str) -> None:
        """Forgets a prepared plan, and calls off one that has moved nothing yet."""
        self._cluster.abort(key, plan_id)

    async def order(self, key: InstanceKey, orders: Sequence[RequestOrder]) -> None:
        """Redirects requests at once; parks, resumes and places them at the next step boundary. Raises StepError,
        FenceError, EngineError.

        Refuses to migrate: simulated instances do so by their own policy alone.
        """
        await self._cluster.order(key, orders)

    async def kill(self, key: InstanceKey) -> None:
        """Ends the instance, if it lives, and frees its place."""
        self._cluster.remove(key)

    async def discover(self) -> Discovery:
        """Nothing: no instance is older than the simulation."""
        return Discovery()

    def _said(self, key: InstanceKey) -> InstanceSnapshot:
        instance = self._cluster.find(key)
        if len(self._cluster.instances) <= MOST_EXACT:
            instance.current.catch_up()
        return instance.snapshot()
