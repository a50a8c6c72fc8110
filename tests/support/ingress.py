"""A real ingress in front of real instance processes, without Ray: uvicorn in a thread, fixed or changing routes."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import uvicorn

from pengserve.cluster.ingress.config import IngressConfig, LimitConfig
from pengserve.cluster.metrics.facade import Metrics
from pengserve.planners.shared_usage import UsageLedger
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import NO_VERSION, Epoch, InstanceId, InstanceKey, Version
from pengserve.planners.types.layout import Layout
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand, Route, RoutingTable
from pengserve.planners.types.tenants import SharedUsage, UsageReport
from tests.support.processes import InstanceProcess

MODEL_NAME = "tiny"
START_TIMEOUT_S = 600.0


class FixedRoutes:
    """A `RoutingSource` that a test sets by hand, from any thread."""

    def __init__(self, processes: Sequence[InstanceProcess] = ()) -> None:
        self.lost: list[tuple[InstanceKey, str]] = []
        self.demands: list[Demand] = []
        self.usage = UsageLedger()
        self.targets: list[LayoutTarget | None] = []  # None: the planner decides again
        self._table = RoutingTable(version=NO_VERSION, epoch=Epoch(0), routes=())
        self.show(processes)

    def show(self, processes: Sequence[InstanceProcess], *, is_draining: bool = False, max_model_len: int = 0) -> None:
        """Routes to these and no others; `max_model_len` is what the widest group would hold."""
        routes = tuple(
            Route(key=p.snapshot.key, endpoint=p.endpoint, members=(p.snapshot.key.instance_id,), shape="dp")
            for p in processes
        )
        self._table = RoutingTable(
            version=self._table.version.next,
            epoch=Epoch(0),
            routes=routes,
            is_draining=is_draining,
            max_model_len=max_model_len,
        )

    async def routing(self, known_version: Version, timeout_s: float) -> RoutingTable:
        """See `RoutingSource`."""
        deadline_s = time.monotonic() + timeout_s
        while self._table.version <= known_version and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return self._table

    async def snapshot(self) -> ClusterSnapshot:
        """See `RoutingSource`."""
        layout = Layout.all_dp(tuple(InstanceId(i) for i in range(len(self._table.routes))), Epoch(0))
        return ClusterSnapshot(app="tests", time_s=time.time(), layout=layout, instances=())

    async def events(self, after: int, limit: int) -> tuple[Event, ...]:
        """See `RoutingSource`."""
        events = (Event(seq=i, time_s=0.0, kind=EventKind.ROUTING_CHANGED) for i in range(1, 4))
        return tuple(event for event in events if event.seq > after)[:limit]

    async def report_lost(self, key: InstanceKey, why: str) -> None:
        """See `RoutingSource`."""
        self.lost.append((key, why))

    async def report_demand(self, client_id: str, demand: Demand) -> None:
        """See `RoutingSource`."""
        self.demands.append(demand)

    async def share_usage(self, client_id: str, report: UsageReport) -> SharedUsage:
        """See `RoutingSource`."""
        return self.usage.share(client_id, report, time.monotonic())

    async def set_layout(self, target: LayoutTarget) -> None:
        """See `RoutingSource`."""
        self.targets.append(target)

    async def auto_layout(self) -> None:
        """See `RoutingSource`."""
        self.targets.append(None)

    async def drain(self, timeout_s: float) -> bool:
        """See `RoutingSource`."""
        return True


def ingress_config(processes: Sequence[InstanceProcess], **changes: Any) -> IngressConfig:
    """What an ingress of these instances needs."""
    given: dict[str, Any] = {
        "instance": processes[0].config,
        "num_instances": 4,
        "served_model_names": (MODEL_NAME,),
        "metrics_backend": "prometheus",
        "limits": LimitConfig(allow_grammars=True),
    }
    return IngressConfig(**{**given, **changes})


@contextlib.contextmanager
def serving(config: IngressConfig, source: Any, wrap: Callable[[Any], Any] = lambda app: app) -> Iterator[str]:
    """Serves an ingress, with `wrap` around its application, from a thread of its own; yields its URL."""
    # The ingress hardens vLLM's environment, which vLLM reads at import.
    from pengserve.cluster.ingress.guards.security import harden

    harden(config)
    from pengserve.cluster.ingress.api import IngressRuntime

    metrics = Metrics("prometheus", app="tests")

    async def application() -> Any:
        return wrap(await IngressRuntime(config, source, metrics, metrics.exposition).build_app())

    box: dict[str, uvicorn.Server] = {}
    failures: list[BaseException] = []

    def run() -> None:
        async def main() -> None:
            app = await application()
            box["server"] = uvicorn.Server(
                uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", access_log=False)
            )
            await box["server"].serve()

        try:
            asyncio.run(main())
        except BaseException as error:
            failures.append(error)
            raise

    thread = threading.Thread(target=run, name="ingress", daemon=True)
    thread.start()
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not (box and box["server"].started):
        assert not failures, f"the ingress did not start: {failures}"
        assert time.monotonic() < deadline_s, "the ingress did not start in time"
        time.sleep(0.02)
    port = box["server"].servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        box["server"].should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the ingress did not stop"


def wait_ready(url: str, timeout_s: float = 240.0) -> None:
    """Blocks until the ingress at `url` takes requests."""
    deadline_s = time.monotonic() + timeout_s
    with httpx.Client(base_url=url, trust_env=False) as http:
        while (answer := http.get("/ready")).status_code != 200:
            assert time.monotonic() < deadline_s, f"not ready: {answer.text}"
            time.sleep(0.05)
