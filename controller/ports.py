"""What the controller asks of the world: one protocol, so that its state machine is tested without a cluster."""

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.orders import RequestOrder
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import InstanceSnapshot

StatusCall = Coroutine[Any, Any, InstanceSnapshot]


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What earlier controllers of this application left behind."""

    living: tuple[InstanceKey, ...] = ()  # started from the same configuration; can be adopted
    leftovers: tuple[InstanceKey, ...] = ()  # reserved resources of the dead
    outgoing: tuple[InstanceKey, ...] = ()  # living, of another configuration; never adopted, see `retire`
    newest: tuple[InstanceKey, ...] = ()  # the newest life each slot ever had, also where nothing of it is left


class ReplicaPort(Protocol):
    """Creates, asks and ends instances. All calls are idempotent; the caller bounds them in time."""

    async def create(self, key: InstanceKey) -> None:
        """Reserves resources and starts an instance. Returns before it is placed; one that exists is left alone.

        Raises:
            EngineError: it cannot be created; says why.
        """
        ...

    async def status(self, key: InstanceKey) -> InstanceSnapshot:
        """The instance's own view of itself; renews its lease. Waits for as long as it is being placed.

        Raises:
            EngineError: the instance is gone for good. Any other trouble shows as silence.
        """
        ...

    def statuses(self, keys: Sequence[InstanceKey]) -> Sequence[InstanceSnapshot | StatusCall]:
        """Asks many instances as `status` does. Never blocks, and raises nothing.

        Returns for each of `keys`, in their order, the answer where it is there at once. For the others it returns
        calls that are not begun yet: the caller begins them, and they raise errors.
        """
        ...

    async def drain(self, key: InstanceKey, timeout_s: float) -> bool:
        """Lets running requests finish; True once nothing runs there.

        Raises:
            EngineError: the instance is gone.
        """
        ...

    async def retire(self, key: InstanceKey, timeout_s: float) -> bool:
        """Lets an instance of another configuration go on until its ingresses have left; True once nothing runs there.

        Raises:
            EngineError: the instance is gone.
        """
        ...

    async def connect(self, key: InstanceKey, directory: PeerDirectory) -> None:
        """Tells an instance its peers. Returns at once; `groups_ready` in its status shows what came of it.

        Raises:
            EngineError: the instance is gone.
        """
        ...

    async def prepare(self, key: InstanceKey, plan: SwitchPlan) -> None:
        """Asks a member whether it can take part: lanes, communicators and epoch fit. Changes nothing visible.

        Raises:
            StepError: it cannot, and says why (FenceError: its epoch is another). EngineError: the instance is gone.
        """
        ...

    async def commit(self, key: InstanceKey, plan: SwitchPlan) -> SwitchReport:
        """Asks the leader, and it alone, to carry out a plan that all members have prepared.

        Idempotent by `plan_id`. Raises:
            StepError: nothing was changed and all members serve on as before.
            EngineError: the instance is gone; whether the switch happened shows in the members' status.
        """
        ...

    async def abort(self, key: InstanceKey, plan_id: str) -> None:
        """Forgets a prepared plan. Harmless where there is none, or where it was committed."""
        ...

    async def order(self, key: InstanceKey, orders: Sequence[RequestOrder]) -> None:
        """Gives an instance orders about its requests. Returns at once; its status shows what comes of them.

        Idempotent by their ids. Raises:
            FenceError: one is for another life. StepError: it cannot carry out any. EngineError: the instance is gone.
        """
        ...

    async def kill(self, key: InstanceKey) -> None:
        """Ends the instance, if it lives, and frees its resources."""
        ...

    async def discover(self) -> Discovery:
        """Instances and reservations of this application that exist now."""
        ...
