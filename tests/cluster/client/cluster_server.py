"""A real HTTP server that answers the cluster routes from values a test sets; no Ray, no vLLM."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from pengserve.planners.types.codec import to_data
from pengserve.planners.types.drains import DrainOperation, DrainPhase
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey, Version
from pengserve.planners.types.layout import Layout, parse_groups
from pengserve.planners.types.snapshot import (
    ClusterSnapshot,
    DeviceInfo,
    InstanceSnapshot,
    InstanceState,
    InstanceStats,
    KvCapacity,
    LayoutPolicy,
    LayoutView,
    Route,
    RoutingTable,
    SwitchRecord,
)

VERSION = Version(term=2, counter=7)
ADMIN_KEY = "admin-secret"
CAPACITY = KvCapacity(
    num_blocks=100, block_size=32, bytes_per_block=1 << 16, max_model_len=2048, max_num_seqs=64, weight_bytes=20 << 20
)


def instance(
    slot: int, state: InstanceState = InstanceState.READY, incarnation: int = 0, **stats: int
) -> InstanceSnapshot:
    """An instance with the given counts; its capacity is known once it is ready."""
    return InstanceSnapshot(
        key=InstanceKey(instance_id=InstanceId(slot), incarnation=incarnation),
        state=state,
        endpoint=f"127.0.0.1:{7000 + slot}",
        device=DeviceInfo(pid=1000 + slot),
        capacity=CAPACITY if state is InstanceState.READY else None,
        stats=InstanceStats(**stats),
    )


def snapshot(*instances: InstanceSnapshot, time_s: float = 1000.0) -> ClusterSnapshot:
    """A cluster of `instances`, all alone in their groups."""
    ids = tuple(i.instance_id for i in instances)
    return ClusterSnapshot(
        app="pengserve",
        time_s=time_s,
        layout=Layout.all_dp(ids, Epoch(3)),
        instances=instances,
        routing_version=VERSION,
    )


def layout_view(
    layout: str, target: str = "", epoch: int = 3, last: SwitchRecord | None = None, **more: Any
) -> LayoutView:
    """A view of two instances laid out as `layout`; pinned to `target`, or where that is empty left to the planner."""
    return LayoutView(
        time_s=1000.0,
        layout=Layout(epoch=Epoch(epoch), groups=parse_groups(layout)),
        layout_since_s=990.0,
        policy=LayoutPolicy(is_auto=not target, target=parse_groups(target)),
        **{"formable": parse_groups("tp2@(0,1)"), "cannot": (), "last_switch": last, **more},
    )


@dataclass(slots=True, kw_only=True)
class ClusterState:
    """What the server answers; tests change it while it runs."""

    snapshots: list[ClusterSnapshot] = field(default_factory=list)  # each status takes one; the last one stays
    events: list[Event] = field(default_factory=list)
    ready_after: int = 0  # refusals before /ready says yes
    drain_phases: list[DrainPhase] = field(default_factory=lambda: [DrainPhase.MOVING])
    undrained: list[int] = field(default_factory=list)
    drained_with_s: list[float] = field(default_factory=list)
    layouts: list[LayoutView] = field(default_factory=list)  # each look takes one; the last one stays
    layouts_asked: list[dict[str, Any]] = field(default_factory=list)
    replies: dict[str, Any] = field(default_factory=dict)  # path -> JSON answered instead of the right one
    url: str = ""

    @property
    def routing(self) -> RoutingTable:
        """A route to each ready instance of the newest snapshot."""
        routes = tuple(
            Route(key=i.key, endpoint=i.endpoint, members=(i.instance_id,), shape="dp")
            for i in self.snapshots[-1].instances
            if i.state is InstanceState.READY
        )
        return RoutingTable(version=VERSION, epoch=Epoch(3), routes=routes)


def some_events(count: int) -> list[Event]:
    """`count` events, numbered from 1."""
    kinds = list(EventKind)
    return [
        Event(
            seq=i, time_s=1000.0 + i, kind=kinds[i % len(kinds)], why=f"reason {i}", span=f"instance:{i}", data={"i": i}
        )
        for i in range(1, count + 1)
    ]


@contextmanager
def cluster_server(state: ClusterState) -> Iterator[ClusterState]:
    """Serve `state` on a free port of the loopback; `state.url` says where."""
    config = uvicorn.Config(_application(state), host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    started = threading.Event()
    for _ in range(1000):
        if server.started or started.wait(0.01):
            break
    assert server.started
    state.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield state
    finally:
        server.should_exit = True
        thread.join(10)


def _application(state: ClusterState) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def guard(request: Request, call_next):
        if request.url.path.startswith("/cluster") and request.headers.get("authorization") != f"Bearer {ADMIN_KEY}":
            return JSONResponse({"error": {"message": "no"}}, status_code=401, headers={"x-request-id": "req-401"})
        if request.url.path in state.replies:
            return JSONResponse(state.replies[request.url.path])
        return await call_next(request)

    @app.get("/cluster/status")
    async def status():
        return to_data(state.snapshots.pop(0) if len(state.snapshots) > 1 else state.snapshots[0])

    @app.get("/cluster/events")
    async def events(after: int = 0, limit: int = 100):
        return {"events": [to_data(e) for e in state.events if e.seq > after][:limit]}

    @app.get("/cluster/routing")
    async def routing():
        return to_data(state.routing)

    @app.get("/cluster/layout")
    async def layout():
        return to_data(state.layouts.pop(0) if len(state.layouts) > 1 else state.layouts[0])

    @app.put("/cluster/layout")
    async def set_layout(request: Request):
        state.layouts_asked.append(await request.json())
        if state.layouts_asked[-1]["layout"] == "tp9":
            return JSONResponse({"error": {"message": "tp9 is not possible here: choose dp"}}, status_code=400)
        return await layout()

    @app.post("/cluster/drain")
    async def drain(request: Request):
        state.drained_with_s.append((await request.json())["timeout_s"])
        return {"drained": True}

    @app.post("/cluster/instances/{instance}/drain")
    async def drain_instance(instance: int, request: Request):
        state.drained_with_s.append((await request.json())["timeout_s"])
        return await drain_operation(instance)

    @app.get("/cluster/instances/{instance}/drain")
    async def drain_operation(instance: int):
        phase = state.drain_phases.pop(0) if len(state.drain_phases) > 1 else state.drain_phases[0]
        key = InstanceKey(instance_id=InstanceId(instance), incarnation=1)
        is_done = phase is DrainPhase.DONE
        return to_data(
            DrainOperation(id=f"drain-{key}", key=key, phase=phase, num_left=2 - 2 * is_done, safe_to_delete=is_done)
        )

    @app.post("/cluster/instances/{instance}/undrain")
    async def undrain(instance: int):
        state.undrained.append(instance)
        return {"undrained": True}

    @app.get("/live")
    async def live():
        return {"live": True}

    @app.get("/ready")
    async def ready():
        if state.ready_after > 0:
            state.ready_after -= 1
            return JSONResponse({"ready": False, "why": "no instance is ready"}, status_code=503)
        return {"ready": True, "why": ""}

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": "demo", "object": "model", "created": 0, "owned_by": "pengserve"}]}

    return app
