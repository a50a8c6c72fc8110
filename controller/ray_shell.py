"""Everything of the controller that touches Ray: the port to the instances, and the actor that runs the loop.

Names in the cluster, all in namespace "pengserve":

    actor, its        pengserve:{app}:instance:{instance_id}.{incarnation}:{fingerprint of the configuration}
    placement group   the same
    key-value store   pengserve:{app}:instance:{instance_id} -> the name of the slot's newest life
                      pengserve:{app}:term:{number} -> 1; the terms of controllers (ray_terms.py)
                      pengserve:{app}:fingerprint -> that of the controller that recovered last
                      pengserve:{app}:channel-token -> the shared secret of the application's request channels

Actors and groups are detached, so that they outlive a controller; a new one finds them by these names. The fingerprint
keeps it from adopting, and from ever calling, instances that run another model or other engine arguments: those are
retired.
"""

import asyncio
import hashlib
import logging
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ray
from ray import PlacementGroupID
from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnavailableError,
    ActorUnschedulableError,
    RayActorError,
    RayTaskError,
    RuntimeEnvSetupError,
)
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put
from ray.util import list_named_actors, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pengserve.controller.collector import spare_the_loop
from pengserve.controller.events import EventLog
from pengserve.controller.line_file import FileLimits
from pengserve.controller.loop import Controller
from pengserve.controller.ports import Discovery, StatusCall
from pengserve.controller.ray_terms import RayTermStore
from pengserve.controller.succession import Succession
from pengserve.controller.terms import Term
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.directory import PeerDirectory
from pengserve.planners.types.drains import DrainOperation
from pengserve.planners.types.errors import EngineError, PengServeError
from pengserve.planners.types.events import Event
from pengserve.planners.types.ids import NO_VERSION, InstanceId, InstanceKey, Version
from pengserve.planners.types.names import NAMESPACE, fingerprint_name
from pengserve.planners.types.orders import RequestOrder
from pengserve.planners.types.plans import LayoutTarget, SwitchPlan, SwitchReport
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand, InstanceSnapshot, RoutingTable
from pengserve.planners.types.tenants import SharedUsage, UsageReport

logger = logging.getLogger(__name__)

_INSTANCE_CONCURRENCY = 16  # a drain waits inside the actor; status calls must pass it
_RECOVERY_TIMEOUT_S = 15.0  # for calls that come right after a controller's start
_MIN_CPUS = 0.001  # a bundle cannot be empty
_GONE = (RayActorError, ActorPlacementGroupRemoved, ActorUnschedulableError, RuntimeEnvSetupError)

T = TypeVar("T")


def instance_name(app: str, key: InstanceKey | InstanceId | str) -> str:
    """Beginning of the names of a life, of a slot, or of all, where `key` is less than a life."""
    return f"pengserve:{app}:instance:{key}"


def fingerprint(*parts: Any) -> str:
    """Short hash of what instances are started with."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def channel_token(app: str) -> str:
    """The application's secret for request channels. The first process that calls this makes it; all others read it.

    It is kept here because Serve shows the arguments of deployments and their actors on its dashboard.
    """
    name = _channel_token_name(app)
    _internal_kv_put(name, secrets.token_urlsafe(32), overwrite=False, namespace=NAMESPACE)
    token: bytes = _internal_kv_get(name, namespace=NAMESPACE)
    return token.decode()


def forget_channel_token(app: str) -> None:
    """Have the application's next start make another secret. Call when nothing of it runs any more."""
    _internal_kv_del(_channel_token_name(app), namespace=NAMESPACE)


def _channel_token_name(app: str) -> str:
    return f"pengserve:{app}:channel-token"


class RayPort:
    """`ReplicaPort` over Ray: an instance is a detached named actor in a placement group of its own.

    Ray's own calls block on its control service, so each runs in a thread.
    """

    def __init__(
        self,
        config: ControllerConfig,
        instance_config: Any,
        actor_class: type,
        actor_env: Mapping[str, str],
        term: Term,
    ) -> None:
        """`term` is that of the controller that uses this port; the instances get it with every call."""
        self._config, self._instance_config, self._term = config, instance_config, term
        self._actor_class: Any = ray.remote(actor_class)
        self._env = dict(actor_env)
        self._fingerprint = fingerprint(instance_config, sorted(self._env.items()), self._bundle())
        self._name = re.compile(rf"pengserve:{re.escape(config.app)}:instance:(\d+)\.(\d+)(?::(\w+))?")
        self._marks: dict[InstanceKey, str] = {}  # fingerprints of living instances of other configurations
        self._handles: dict[InstanceKey, Any] = {}
        self._groups: dict[InstanceKey, PlacementGroup] = {}  # of the instances this controller created
        # A create that outlives its time-out must not leave an instance behind after its kill.
        self._one_at_a_time: dict[InstanceKey, threading.Lock] = {}

    async def create(self, key: InstanceKey) -> None:
        """Starts the instance's detached actor. Where two controllers overlap, the second finds it by its name."""
        lock = self._one_at_a_time.setdefault(key, threading.Lock())
        self._handles[key] = await _in_thread(lock, lambda: self._create(key))

    async def status(self, key: InstanceKey) -> InstanceSnapshot:
        """The instance's own view of itself. Raises EngineError where its actor is gone for good."""
        handle = await self._handle(key)
        answer: InstanceSnapshot = await _answer(handle.status.remote(self._term.number))
        return answer

    def statuses(self, keys: Sequence[InstanceKey]) -> list[StatusCall]:
        """One call for each of `keys`, not begun yet: every actor answers in its own time."""
        return [self.status(key) for key in keys]

    async def drain(self, key: InstanceKey, timeout_s: float) -> bool:
        """Lets running requests finish within `timeout_s`; True once the instance runs none. Raises EngineError."""
        handle = await self._handle(key)
        return bool(await _answer(handle.drain.remote(timeout_s, self._term.number)))

    async def retire(self, key: InstanceKey, timeout_s: float) -> bool:
        """Lets an instance of another configuration go on until its ingresses have left. Raises EngineError."""
        handle = await self._handle(key)
        return bool(await _answer(handle.retire.remote(timeout_s, self._term.number)))

    async def connect(self, key: InstanceKey, directory: PeerDirectory) -> None:
        """Sends the instance the directory of its peers, and does not wait for groups. Raises EngineError."""
        handle = await self._handle(key)
        await _answer(handle.connect.remote(directory, self._term.number))

    async def prepare(self, key: InstanceKey, plan: SwitchPlan) -> None:
        """Asks a member whether it can take part in `plan`. Raises StepError where it cannot, or EngineError."""
        handle = await self._handle(key)
        await _answer(handle.prepare.remote(plan, self._term.number))

    async def commit(self, key: InstanceKey, plan: SwitchPlan) -> SwitchReport:
        """Asks the leader to carry out a prepared plan. Raises StepError where nothing was changed, or EngineError."""
        handle = await self._handle(key)
        report: SwitchReport = await _answer(handle.commit.remote(plan, self._term.number))
        return report

    async def abort(self, key: InstanceKey, plan_id: str) -> None:
        """Tells a member to forget a prepared plan; harmless where it has none."""
        handle = await self._handle(key)
        await _answer(handle.abort.remote(plan_id, self._term.number))

    async def order(self, key: InstanceKey, orders: Sequence[RequestOrder]) -> None:
        """Gives an instance orders about its requests. Raises StepError, or EngineError where its actor is gone."""
        handle = await self._handle(key)
        await _answer(handle.order.remote(tuple(orders), self._term.number))

    async def kill(self, key: InstanceKey) -> None:
        """Kills the instance's actor, if it lives, and removes its placement group."""
        lock = self._one_at_a_time.setdefault(key, threading.Lock())
        await _in_thread(lock, lambda: self._kill(key))
        self._marks.pop(key, None)
        self._handles.pop(key, None)
        self._groups.pop(key, None)
        self._one_at_a_time.pop(key, None)

    async def discover(self) -> Discovery:
        """This application's actors and placement groups on the Ray cluster, and the newest life of each slot."""
        return await asyncio.to_thread(self._discover)

    def _create(self, key: InstanceKey) -> Any:
        newest: bytes | None = _internal_kv_get(fingerprint_name(self._config.app), namespace=NAMESPACE)
        if newest is not None and newest.decode() != self._fingerprint:
            raise EngineError("the application has another configuration now; its controller creates instances")
        name = self._actor_name(key)
        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            logger.debug("actor %s does not exist yet", name)
        group = placement_group([self._bundle()], strategy="STRICT_PACK", name=name, lifetime="detached")
        self._groups[key] = group
        # Written before the instance lives: a controller that finds nothing of it must not give its key out again.
        _internal_kv_put(instance_name(self._config.app, key.instance_id), name, overwrite=True, namespace=NAMESPACE)
        options: dict[str, Any] = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "max_restarts": 0,  # a restarted actor would be a new life under an old key
            "max_concurrency": _INSTANCE_CONCURRENCY,
            "num_cpus": self._config.cpus_per_instance,
            "num_gpus": self._config.gpus_per_instance,
            "runtime_env": {"env_vars": self._env},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=0
            ),
        }
        return self._actor_class.options(**options).remote(self._instance_config, key)

    def _bundle(self) -> dict[str, float]:
        wanted = {"CPU": self._config.cpus_per_instance, "GPU": self._config.gpus_per_instance}
        return {name: amount for name, amount in wanted.items() if amount > 0} or {"CPU": _MIN_CPUS}

    def _actor_name(self, key: InstanceKey) -> str:
        mark = self._marks.get(key, self._fingerprint)
        return instance_name(self._config.app, key) + (f":{mark}" if mark else "")

    def _kill(self, key: InstanceKey) -> None:
        name = self._actor_name(key)
        try:
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        except ValueError:
            logger.debug("actor %s has ended already", name)
        # Listing all groups of a large cluster takes a while; only what this controller did not create needs it.
        if key in self._groups:
            remove_placement_group(self._groups[key])
            return
        for group, group_name in _all_groups():
            if self._key(group_name)[0] == key:
                remove_placement_group(group)

    def _discover(self) -> Discovery:
        _internal_kv_put(
            fingerprint_name(self._config.app), self._fingerprint.encode(), overwrite=True, namespace=NAMESPACE
        )
        actors: dict[InstanceKey, str] = {}
        for entry in list_named_actors(all_namespaces=True):
            key, mark = self._key(entry["name"])
            if key and entry["namespace"] == NAMESPACE:
                actors[key] = mark
        reserved = {key for _, name in _all_groups() if (key := self._key(name)[0])}
        self._marks = {key: mark for key, mark in actors.items() if mark != self._fingerprint}
        return Discovery(
            living=tuple(sorted(actors.keys() - self._marks.keys())),
            outgoing=tuple(sorted(self._marks)),
            leftovers=tuple(sorted(reserved - actors.keys())),
            newest=self._newest(),
        )

    def _newest(self) -> tuple[InstanceKey, ...]:
        names = _internal_kv_list(instance_name(self._config.app, ""), namespace=NAMESPACE)
        values = [_internal_kv_get(name, namespace=NAMESPACE) for name in names]
        return tuple(key for value in values if (key := self._key(value.decode())[0]))

    def _key(self, name: str) -> tuple[InstanceKey | None, str]:
        """The life a name of this application stands for, and the fingerprint in it."""
        match = self._name.fullmatch(name)
        if not match:
            return None, ""
        return InstanceKey(instance_id=InstanceId(int(match[1])), incarnation=int(match[2])), match[3] or ""

    async def _handle(self, key: InstanceKey) -> Any:
        if key not in self._handles:
            name = self._actor_name(key)
            try:
                self._handles[key] = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)
            except ValueError as error:
                raise EngineError("its process has ended") from error
        return self._handles[key]


class ControllerShell:
    """The controller as an async Ray actor. Starts by itself; every method returns soon or at its own time-out."""

    def __init__(
        self, config: ControllerConfig, instance_config: Any, actor_class: type, actor_env: Mapping[str, str]
    ) -> None:
        spare_the_loop()
        store = RayTermStore(config.app, NAMESPACE)

        def make() -> Controller:
            term = Term(store)
            port = RayPort(config, instance_config, actor_class, actor_env, term)
            return Controller(config, port, _event_log(config), term)

        self._succession = Succession(make, store)
        # Ray runs the constructor of an async actor on the actor's event loop.
        self._loop = asyncio.get_running_loop().create_task(self._succession.run(), name="control loop")

    async def routing(self, known_version: Version = NO_VERSION, timeout_s: float = 10.0) -> RoutingTable:
        """The routing table: at once if newer than `known_version`, else when it changes or at the time-out."""
        return await self._succession.current.routing(known_version, timeout_s)

    async def snapshot(self) -> ClusterSnapshot:
        """The cluster as of the last tick."""
        await self._succession.current.recovered(_RECOVERY_TIMEOUT_S)
        return self._succession.current.snapshot()

    async def events(self, after: int = 0, limit: int = 100) -> tuple[Event, ...]:
        """At most `limit` events with a number above `after`, the oldest first."""
        return self._succession.current.events(after, limit)

    async def report_lost(self, key: InstanceKey, why: str) -> None:
        """An ingress lost its link to `key`: the controller looks at once."""
        self._succession.current.report_lost(key, why)

    async def report_demand(self, client_id: str, demand: Demand) -> None:
        """What the ingress `client_id` wants and has not got; a wish that needs another layout is looked at at once."""
        self._succession.current.report_demand(client_id, demand)

    async def share_usage(self, client_id: str, report: UsageReport) -> SharedUsage:
        """What the ingress `client_id` has charged tenants, and what all ingresses together have."""
        return self._succession.current.share_usage(client_id, report)

    async def set_layout(self, target: LayoutTarget) -> None:
        """Changes the layout to `target` and keeps it; returns before that has happened. Raises PlanError."""
        await self._succession.current.recovered(_RECOVERY_TIMEOUT_S)
        self._succession.current.set_layout(target)

    async def auto_layout(self) -> None:
        """Lets the merge planner decide about the layout again."""
        self._succession.current.auto_layout()

    async def drain(self, timeout_s: float) -> bool:
        """Drains and ends all instances; True where all had finished. Call it before the application is deleted."""
        await self._succession.current.recovered(_RECOVERY_TIMEOUT_S)
        return await self._succession.current.drain(timeout_s)

    async def drain_instance(self, instance_id: int, timeout_s: float) -> DrainOperation:
        """Empties one instance and keeps its slot empty; returns at once. Raises PlanError."""
        await self._succession.current.recovered(_RECOVERY_TIMEOUT_S)
        return await self._succession.current.drain_instance(instance_id, timeout_s)

    async def drain_operation(self, instance_id: int) -> DrainOperation:
        """The drain of an instance as it is now. Raises PlanError where it is not drained."""
        await self._succession.current.recovered(_RECOVERY_TIMEOUT_S)
        return self._succession.current.drain_operation(instance_id)

    async def undrain(self, instance_id: int) -> None:
        """Fills a drained slot again. Raises PlanError."""
        await self._succession.current.recovered(_RECOVERY_TIMEOUT_S)
        await self._succession.current.undrain(instance_id)

    async def shutdown(self) -> None:
        """Ends the control loop. Instances live on for the next controller, or until their lease ends."""
        await self._succession.current.stop()
        if self._succession.current.is_superseded:
            self._loop.cancel()  # it stands by
        await asyncio.gather(self._loop, return_exceptions=True)


def _event_log(config: ControllerConfig) -> EventLog:
    limits = FileLimits(max_bytes=config.event_log_max_bytes, num_older=config.event_log_num_older)
    return EventLog(config.event_log_path, limits=limits)


def _all_groups() -> list[tuple[PlacementGroup, str]]:
    """All placement groups that exist, with their names."""
    return [
        (PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))), entry["name"])
        for group_id, entry in placement_group_table().items()
        if entry["state"] != "REMOVED"
    ]


async def _in_thread(lock: threading.Lock, work: Callable[[], T]) -> T:
    def locked() -> T:
        with lock:
            return work()

    return await asyncio.to_thread(locked)


async def _answer(reference: Any) -> Any:
    """The result of an actor call; EngineError where the actor is gone for good, else the error it raised itself."""
    try:
        return await reference
    except RayTaskError as error:
        # Ray's class derives from both its own and the cause's; what the method raised on purpose goes on alone.
        if isinstance(error.cause, PengServeError):
            raise error.cause from None
        raise
    except ActorUnavailableError:
        raise  # a broken connection; the actor may be well
    except _GONE as error:
        raise EngineError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """What a person needs of Ray's page-long messages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"error|exit|killed|SIG|memory", line, re.IGNORECASE)]
    line = (telling or lines or [type(error).__name__])[-1]
    detail = line.rpartition("Worker exit detail: ")[2].partition("Some common causes")[0].strip()
    return f"its process has ended: {detail[:300]}"
