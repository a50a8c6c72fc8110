"""A cluster that is only told of: snapshots and events of any number of instances, behind the ingress's routes."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI

from pengserve.cluster.ingress import errors
from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.ingress.guards.admin import AdminDoor
from pengserve.cluster.ingress.guards.guard import Guard
from pengserve.cluster.ingress.guards.keys import KeyRing
from pengserve.cluster.ingress.in_flight.traffic import Traffic
from pengserve.cluster.ingress.routing.routes import EMPTY_TABLE
from pengserve.cluster.ingress.steering.cluster_api import attach_cluster_routes, cluster_router
from pengserve.cluster.ui.feed import Feed
from pengserve.cluster.ui.routes import ui_router
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.drains import DrainOperation, DrainPhase
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey
from pengserve.planners.types.layout import Group, Layout, parse_groups
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import (
    ClusterSnapshot,
    DeviceInfo,
    InstanceSnapshot,
    InstanceState,
    InstanceStats,
    KvCapacity,
    LaneInfo,
)

CAPACITY = KvCapacity(
    num_blocks=1000, block_size=32, bytes_per_block=1 << 20, max_model_len=4096, max_num_seqs=64, weight_bytes=2 << 30
)
WIDE = replace(CAPACITY, num_blocks=4048)  # of a pipeline of two: the room of a copy of the weights is KV


class SimulatedCluster:
    """A `RoutingSource` whose answers a test sets. Its load moves a little with each look."""

    def __init__(self, num_instances: int, *, groups: str = "", host_blocks: int = 0) -> None:
        self.num_instances, self.host_blocks = num_instances, host_blocks
        self.groups: tuple[Group, ...] = parse_groups(groups) if groups else ()
        self.states: dict[int, InstanceState] = {}
        self.told: list[Event] = []
        self.targets: list[LayoutTarget | None] = []
        self.drained: list[int] = []
        self.num_looks = 0
        self.is_away = False

    def tell(self, kind: EventKind, why: str = "", span: str = "", **data: Any) -> None:
        """Adds an event to the log."""
        event = Event(seq=len(self.told) + 1, time_s=time.time(), kind=kind, why=why, span=span, data=data)
        self.told.append(event)

    async def snapshot(self) -> ClusterSnapshot:
        """See `RoutingSource`."""
        if self.is_away:
            raise EngineError("the controller does not answer")
        self.num_looks += 1
        ids = [InstanceId(i) for i in range(self.num_instances)]
        grouped = {member for group in self.groups for member in group.members}
        alone = tuple(Layout.all_dp(tuple(i for i in ids if i not in grouped), Epoch(0)).groups)
        formable = tuple(group for i in ids[:-1:2] for group in parse_groups(f"tp2@({i},{i + 1})"))
        return ClusterSnapshot(
            app="simulated",
            time_s=time.time(),
            layout=Layout(epoch=Epoch(3), groups=(*self.groups, *alone)),
            instances=tuple(self._instance(i) for i in ids),
            groups=formable[:8],
            controller_started_s=1.0,
            ranks=tuple(ids),
        )

    def _instance(self, instance_id: InstanceId) -> InstanceSnapshot:
        look = self.num_looks
        group = next((group for group in self.groups if instance_id in group.members), None)
        shape = group.shape if group is not None else "dp"
        is_follower = group is not None and group.leader != instance_id
        used = 0 if is_follower else (instance_id * 137 + look * 11) % 900
        stats = InstanceStats(
            shape=shape,
            is_follower=is_follower,
            num_running=0 if is_follower else used // 30,
            num_waiting=0 if is_follower or used < 800 else 3 + look % 4,
            kv_blocks_used=used,
            kv_blocks_total=WIDE.num_blocks if shape.startswith("pp") else CAPACITY.num_blocks,
            block_size=CAPACITY.block_size,
            total_prompt_tokens=look * 900 + instance_id,
            total_generated_tokens=0 if is_follower else look * (200 + used // 5),
            host_blocks=self.host_blocks,
            host_blocks_used=self.host_blocks // 3,
            device_blocks=CAPACITY.num_blocks if self.host_blocks else 0,
            device_blocks_used=used if self.host_blocks else 0,
        )
        lanes = (LaneInfo(shape="dp", capacity=CAPACITY), LaneInfo(shape="pp2", capacity=WIDE))
        state = self.states.get(instance_id, InstanceState.READY)
        return InstanceSnapshot(
            key=InstanceKey(instance_id=instance_id, incarnation=1),
            state=state,
            capacity=CAPACITY,
            device=DeviceInfo(node_id="n", device=f"cuda:{instance_id % 8}", pid=1000 + instance_id),
            stats=stats,
            lanes=lanes,
            failure="its process has ended" if state is InstanceState.DEAD else "",
        )

    async def events(self, after: int, limit: int) -> Sequence[Event]:
        """See `RoutingSource`."""
        return tuple(event for event in self.told if event.seq > after)[:limit]

    async def set_layout(self, target: LayoutTarget) -> None:
        """See `RoutingSource`."""
        self.targets.append(target)
        self.groups = tuple(group for group in target.groups if group.degree > 1)

    async def auto_layout(self) -> None:
        """See `RoutingSource`."""
        self.targets.append(None)

    async def drain_instance(self, instance_id: int, timeout_s: float) -> DrainOperation:
        """See `RoutingSource`."""
        self.drained.append(instance_id)
        key = InstanceKey(instance_id=InstanceId(instance_id), incarnation=1)
        return DrainOperation(id=f"drain-{key}", key=key, phase=DrainPhase.MOVING, num_left=3, safe_to_delete=False)


def application(cluster: SimulatedCluster, feed: Feed | None = None, **config: Any) -> Guard:
    """The cluster's routes and the live page behind the guard, without vLLM's layer."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    errors.install(app)
    instance = InstanceConfig(app="simulated", model="none", channel_token="a-secret-of-the-tests")
    settings = IngressConfig(instance=instance, num_instances=cluster.num_instances, **config)
    keys = KeyRing(settings)
    door = AdminDoor(settings, keys)
    source: Any = cluster
    router = cluster_router(
        source=source,
        table=lambda: EMPTY_TABLE,
        why_not_ready=str,
        start_draining=lambda: None,
        metrics_endpoint=None,
    )
    attach_cluster_routes(app, router)
    attach_cluster_routes(app, ui_router(door, feed or Feed(source), lambda: False))
    traffic = Traffic(max_queued=1, num_ingresses=1, num_slots=lambda: 1)
    return Guard(app, config=settings, traffic=traffic, vocab_size=10, keys=keys, admin=door)


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """Serves an application from a thread; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, name="pages", daemon=True)
    thread.start()
    deadline_s = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline_s, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
