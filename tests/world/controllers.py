"""Controllers as processes: started, killed, two at once, and asked by ingresses."""

import asyncio
from pathlib import Path
from typing import Any

from pengserve.cluster.ingress.routing.routes import CalledSource
from pengserve.controller.events import EventLog
from pengserve.controller.line_file import FileLimits
from pengserve.controller.loop import Controller
from pengserve.controller.succession import Succession
from pengserve.controller.terms import Term
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.events import EventKind
from tests.world.cluster import CONTROLLERS, WorldCluster, WorldPort, WorldTermStore

LOG_LIMITS = FileLimits(max_bytes=20_000, num_older=2)


class ControllerProcess:
    """A process that runs controllers, from its start to its death."""

    def __init__(self, config: ControllerConfig, cluster: WorldCluster, log_path: Path) -> None:
        chaos, loop = cluster.chaos, asyncio.get_running_loop()
        store = WorldTermStore(cluster)
        self._logs: list[EventLog] = []

        def make() -> Controller:
            term = Term(store)
            log = EventLog(
                str(log_path), limits=LOG_LIMITS, wall_clock=chaos.wall_clock, clock=loop.time, write=chaos.write
            )
            self._logs.append(log)
            port = WorldPort(cluster, term)
            return Controller(config, port, log, term, clock=loop.time, wall_clock=chaos.wall_clock)

        self._succession = Succession(make, store, clock=loop.time)
        self.is_alive = True
        self._loop = loop.create_task(self._succession.run(), name="control loop")

    @property
    def controller(self) -> Controller:
        """The one that acts, or that stands by."""
        return self._succession.current

    @property
    def acts(self) -> bool:
        """Whether it controls the cluster, as far as it knows."""
        return self.is_alive and not self.controller.is_superseded

    @property
    def num_stops(self) -> int:
        """How often its newest controller has said that it ends."""
        span = self.controller._span
        events = self.controller.events(limit=1 << 20)
        return sum(event.kind is EventKind.CONTROLLER_STOP and event.span == span for event in events)

    async def kill(self) -> None:
        """SIGKILL: not a word more, in the log either."""
        if self.is_alive:
            self.is_alive = False
            for log in self._logs:
                log.close()
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
            await self.controller._coordinator.close()
            await self.controller._supervision.calls.close()


class Controllers:
    """The controllers of the application, and which of them Serve names."""

    def __init__(self, config: ControllerConfig, cluster: WorldCluster, log_path: Path) -> None:
        self._config, self._cluster, self._log_path = config, cluster, log_path
        self.all: list[ControllerProcess] = []
        self.start()

    @property
    def newest(self) -> ControllerProcess:
        """The one that Serve names, dead or alive."""
        return self.all[-1]

    def start(self) -> ControllerProcess:
        """Starts another one."""
        process = ControllerProcess(self._config, self._cluster, self._log_path)
        self.all.append(process)
        return process

    def living(self) -> list[ControllerProcess]:
        """Those whose process lives."""
        return [process for process in self.all if process.is_alive]


class WorldSource(CalledSource):
    """An ingress's way to the controller, as `RayRoutingSource`: by a handle that is kept while it answers."""

    def __init__(self, controllers: Controllers, cluster: WorldCluster, ingress: str) -> None:
        self._controllers, self._chaos, self._ingress = controllers, cluster.chaos, ingress
        self._handle: ControllerProcess | None = None

    async def _call(self, method: str, *arguments: Any) -> Any:
        self._chaos.reach(f"source.{method}")
        process = self._handle = self._handle or self._controllers.newest
        await self._chaos.travel(self._ingress, CONTROLLERS)
        try:
            if not process.is_alive:
                raise EngineError("the controller does not answer")
            result = getattr(process.controller, method)(*arguments)
            result = await result if asyncio.iscoroutine(result) else result
            await self._chaos.travel(CONTROLLERS, self._ingress)
            if not process.is_alive:
                raise EngineError("the controller does not answer")
        except EngineError:
            self._handle = None
            raise
        return result
