"""One ingress, put together: the FastAPI application, the engine client behind it, and the tasks that feed it."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp

from pengserve.cluster.ingress import errors, openai_front
from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.ingress.demand import DemandReporter
from pengserve.cluster.ingress.engine_client import ClusterEngineClient
from pengserve.cluster.ingress.guards.admin import AdminDoor
from pengserve.cluster.ingress.guards.guard import Guard, current_ticket
from pengserve.cluster.ingress.guards.keys import KeyRing
from pengserve.cluster.ingress.in_flight.records import RequestBook
from pengserve.cluster.ingress.in_flight.traffic import Ticket, Traffic
from pengserve.cluster.ingress.meters import IngressMeters
from pengserve.cluster.ingress.request_log import RequestLog
from pengserve.cluster.ingress.routing.links import LinkPool
from pengserve.cluster.ingress.routing.routes import RouteWatcher, RoutingSource
from pengserve.cluster.ingress.steering.cluster_api import attach_cluster_routes, cluster_router
from pengserve.cluster.ingress.steering.priority_api import priority_router, tenants_router
from pengserve.cluster.ingress.tasks import forever
from pengserve.cluster.ingress.tenants.fair_queue import fair_queue
from pengserve.cluster.ingress.tenants.tenants import Tenants
from pengserve.cluster.ingress.traces import Traces
from pengserve.cluster.ingress.usage_sharing import UsageSharing
from pengserve.cluster.metrics import catalog
from pengserve.cluster.metrics.facade import Metrics
from pengserve.cluster.ui.feed import Feed
from pengserve.cluster.ui.routes import ui_router
from pengserve.cluster.ui.tap import TrafficTap
from pengserve.controller.line_file import FileLimits
from pengserve.planners.types.contract import by_name
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.snapshot import RoutingTable

logger = logging.getLogger(__name__)

SNAPSHOT_PERIOD_S = 5.0
SNAPSHOT_TIMEOUT_S = 5.0


class IngressRuntime:
    """Everything one ingress owns. `app` answers from the start; `start` begins to follow the controller."""

    def __init__(
        self,
        config: IngressConfig,
        source: RoutingSource,
        metrics: Metrics,
        metrics_endpoint: Callable[[], tuple[bytes, str]] | None = None,
    ) -> None:
        """Reads the model's configuration and tokenizer; takes seconds, and no accelerator.

        Raises:
            ConfigError: an engine argument is not usable, or a file of keys cannot be read.
        """
        self.config, self._source, self._metrics = config, source, metrics
        self._metrics_endpoint = metrics_endpoint
        vllm_config = openai_front.make_vllm_config(config)
        self.meters = IngressMeters(metrics, vllm_config, config.num_instances)
        self.traffic = Traffic(
            max_queued=config.limits.max_queued_requests,
            num_ingresses=config.num_ingresses,
            num_slots=self._num_slots,
        )
        self.request_log = RequestLog(
            config.request_log, FileLimits(max_bytes=config.log_max_bytes, num_older=config.log_num_older)
        )
        self.keys = KeyRing(config)
        self.admin = AdminDoor(config, self.keys)
        self.feed = Feed(source, TrafficTap(self.meters))
        self.traces = _traces(config)
        self.client = ClusterEngineClient(
            vllm_config, config.limits, self.meters, self._admit, self.request_log, self.traces
        )
        self.client.tenants = Tenants(config.fairness)
        client_id = f"ingress-{secrets.token_hex(4)}"
        self.links = LinkPool(
            self.client,
            token=config.instance.channel_token,
            client_id=client_id,
            report_lost=source.report_lost,
            fingerprint=config.instance.fingerprint,
        )
        self.fair = fair_queue(config.fairness, by_name(config.classes))
        self.book = RequestBook(
            self.client,
            config.limits,
            self.links,
            lambda: self.client.model_config.max_model_len,
            is_superseded=lambda: self.watcher.is_superseded,
            is_only_ingress=config.num_ingresses == 1,
            secret=config.instance.channel_token,
            fair=self.fair,
        )
        self.demand = DemandReporter(self.book, source, client_id)
        self.sharing: UsageSharing | None = None
        if self.fair is not None and config.num_ingresses > 1:
            self.sharing = UsageSharing(self.fair.shares, self.book, source, client_id)
        self.client.use_book(self.book)
        self.watcher = RouteWatcher(source, self._on_table, lambda up: self.meters.cluster.on_controller(up=up))
        self._tasks: list[asyncio.Task[None]] = []

    async def build_app(self) -> ASGIApp:
        """The ASGI application, lifespan included: it starts and stops this ingress."""

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            self.start()
            try:
                yield
            finally:
                await self.stop()

        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False)
        errors.install(app)
        await openai_front.attach(app, self.client, self.config)
        attach_cluster_routes(
            app,
            cluster_router(
                source=self._source,
                table=lambda: self.watcher.table,
                why_not_ready=self.why_not_ready,
                start_draining=self.start_draining,
                metrics_endpoint=self._metrics_endpoint,
            ),
        )
        by_priority = self.client.vllm_config.scheduler_config.policy == "priority"
        priorities = priority_router(lambda: self.book, by_name(self.config.classes), goes_by_priority=by_priority)
        attach_cluster_routes(app, priorities)
        figures = self.client.tenant_figures
        attach_cluster_routes(app, tenants_router(lambda: figures.uses(self.book.records())))
        router = ui_router(self.admin, self.feed, lambda: self.traffic.is_draining)
        attach_cluster_routes(app, router)
        return Guard(
            app,
            config=self.config,
            traffic=self.traffic,
            vocab_size=self.client.model_config.get_vocab_size(),
            max_model_len=lambda: self.client.model_config.max_model_len,
            on_rejected=self.meters.rejected,
            keys=self.keys,
            admin=self.admin,
            tenants=self.client.tenants,
            abort=self.client.abort_begun,
        )

    def start(self) -> None:
        """Begins to follow the controller and to place requests. In the event loop."""
        jobs: list[tuple[str, Callable[[], Coroutine[None, None, None]]]] = [
            ("routes", self.watcher.run),
            ("requests", self.book.run),
            ("sweep", self.links.sweep),
            ("demand", self.demand.run),
            ("metrics", self._publish),
        ]
        if self.sharing is not None:
            jobs.append(("usage", self.sharing.run))
        if self.request_log.is_on:
            jobs.append(("request log", self.request_log.run))
        if self.keys.has_files:
            jobs.append(("keys", self.keys.follow))
        self._tasks = [asyncio.create_task(forever(name, job), name=f"ingress-{name}") for name, job in jobs]

    @property
    def is_dead(self) -> bool:
        """Whether a task that should run for ever has ended."""
        return any(task.done() for task in self._tasks)

    async def stop(self) -> None:
        """Ends all tasks and closes all links."""
        self.feed.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.links.close()
        await self.request_log.flush()
        if self.traces is not None:
            await asyncio.to_thread(self.traces.close)
        self.client.shutdown()

    def start_draining(self) -> None:
        """Takes no new requests from now on; those in flight go on."""
        self.traffic.is_draining = True

    def why_not_ready(self) -> str:
        """What is missing before new requests can be answered; empty when nothing is."""
        if self.traffic.is_draining:
            return "draining"
        if self.links.ready():
            return ""
        if not self.watcher.table.routes:
            return "no instance is ready" if self.watcher.controller_up else "the controller has not answered yet"
        return "connecting to the instances"

    def _num_slots(self) -> int:
        return sum(link.capacity.max_num_seqs for link in self.links.ready())

    def _admit(self, num_sequences: int) -> None:
        ticket = current_ticket.get() or Ticket(num_sequences)
        try:
            self.traffic.admit(ticket)
        except errors.OverloadedError:
            self.meters.rejected("no_instance" if self.traffic.is_draining else "overload")
            raise

    def _on_table(self, table: RoutingTable) -> None:
        # A drain is asked of one ingress; the others learn of it here.
        if table.is_draining:
            self.start_draining()
        self.links.apply(table)
        self.client.hold(table.max_model_len)
        self.book.wake()
        self.meters.cluster.on_routing(table)

    async def _publish(self) -> None:
        """Brings in what only the controller knows, and pushes metrics where no scraper comes."""
        running = self._metrics.gauge(catalog.REQUESTS_RUNNING)
        self._metrics.on_refresh(lambda: running.set(self.traffic.num_in_flight))
        while True:
            await _quietly(self._take_snapshot(), SNAPSHOT_TIMEOUT_S)
            if self._metrics.backend_name == "ray":
                self._metrics.refresh()
            await asyncio.sleep(SNAPSHOT_PERIOD_S)

    async def _take_snapshot(self) -> None:
        snapshot = await self._source.snapshot()
        self.meters.cluster.on_snapshot(snapshot)
        if self.fair is not None:
            self.fair.follow(snapshot)
        await self.meters.switches.follow(self._source.events, snapshot.controller_started_s)


def _traces(config: IngressConfig) -> Traces | None:
    if not config.otlp_endpoint:
        return None
    model = openai_front.served_names(config)[0]
    return Traces(config.otlp_endpoint, app=config.instance.app, model=model, sample_ratio=config.trace_sample_ratio)


async def _quietly(work: Awaitable[None], timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await work
    except (EngineError, TimeoutError):
        logger.debug("the controller gave no snapshot")
