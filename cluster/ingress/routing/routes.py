"""Where the routing table comes from, and the task that keeps it current."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from pengserve.planners.types.drains import DrainOperation
from pengserve.planners.types.errors import EngineError, SupersededError
from pengserve.planners.types.events import Event
from pengserve.planners.types.ids import NO_VERSION, Epoch, InstanceKey, Version
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand, RoutingTable
from pengserve.planners.types.tenants import SharedUsage, UsageReport

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 10.0  # one long poll; the controller answers at once when the table changes
GRACE_S = 5.0  # on top of what a call may take by itself
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 2.0

EMPTY_TABLE = RoutingTable(version=NO_VERSION, epoch=Epoch(0), routes=())


class RoutingSource(Protocol):
    """The controller, as an ingress sees it. Every method raises EngineError while it cannot be reached."""

    async def routing(self, known_version: Version, timeout_s: float) -> RoutingTable:
        """The table as soon as it is newer than `known_version`, else the current one after `timeout_s`."""

    async def snapshot(self) -> ClusterSnapshot:
        """All that is known of the cluster."""

    async def events(self, after: int, limit: int) -> tuple[Event, ...]:
        """Events with a sequence number above `after`."""

    async def report_lost(self, key: InstanceKey, why: str) -> None:
        """This ingress lost its channel to an instance."""

    async def report_demand(self, client_id: str, demand: Demand) -> None:
        """What the requests of the ingress `client_id` want now; replaces what it said before."""

    async def share_usage(self, client_id: str, report: UsageReport) -> SharedUsage:
        """What an ingress has charged tenants; what all ingresses together have."""

    async def set_layout(self, target: LayoutTarget) -> None:
        """Changes the layout and keeps it so; returns before that has happened. Raises PlanError."""

    async def auto_layout(self) -> None:
        """Lets the merge planner decide about the layout."""

    async def drain(self, timeout_s: float) -> bool:
        """Drains and stops all instances; True when nothing was left running."""

    async def drain_instance(self, instance_id: int, timeout_s: float) -> DrainOperation:
        """Empties one instance and keeps its slot empty; returns at once. Raises PlanError."""

    async def drain_operation(self, instance_id: int) -> DrainOperation:
        """The drain of one instance as it is now. Raises PlanError where it is not drained."""

    async def undrain(self, instance_id: int) -> None:
        """Fills a drained slot again. Raises PlanError."""


class CalledSource(ABC):
    """A `RoutingSource` that passes every call on to a controller elsewhere; subclasses know the way there."""

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> Any:
        """What this method of the controller returns or raises; EngineError while it cannot be reached."""

    async def routing(self, known_version: Version, timeout_s: float) -> RoutingTable:
        """Asks the controller for the table, as soon as it is newer than `known_version` or after `timeout_s`."""
        table: RoutingTable = await self._call("routing", known_version, timeout_s)
        return table

    async def snapshot(self) -> ClusterSnapshot:
        """Asks the controller for all that is known of the cluster."""
        snapshot: ClusterSnapshot = await self._call("snapshot")
        return snapshot

    async def events(self, after: int, limit: int) -> tuple[Event, ...]:
        """Asks the controller for events with a sequence number above `after`."""
        events: tuple[Event, ...] = await self._call("events", after, limit)
        return events

    async def report_lost(self, key: InstanceKey, why: str) -> None:
        """Tells the controller that this ingress lost its channel to an instance."""
        await self._call("report_lost", key, why)

    async def report_demand(self, client_id: str, demand: Demand) -> None:
        """Tells the controller what the requests of the ingress `client_id` want now."""
        await self._call("report_demand", client_id, demand)

    async def share_usage(self, client_id: str, report: UsageReport) -> SharedUsage:
        """Tells the controller what the ingress `client_id` has charged tenants, and asks what all have."""
        shared: SharedUsage = await self._call("share_usage", client_id, report)
        return shared

    async def set_layout(self, target: LayoutTarget) -> None:
        """Asks the controller to change the layout and keep it so."""
        await self._call("set_layout", target)

    async def auto_layout(self) -> None:
        """Asks the controller to decide about the layout again."""
        await self._call("auto_layout")

    async def drain(self, timeout_s: float) -> bool:
        """Asks the controller to drain and stop all instances; True when nothing was left running."""
        return bool(await self._call("drain", timeout_s))

    async def drain_instance(self, instance_id: int, timeout_s: float) -> DrainOperation:
        """Asks the controller to empty one instance."""
        operation: DrainOperation = await self._call("drain_instance", instance_id, timeout_s)
        return operation

    async def drain_operation(self, instance_id: int) -> DrainOperation:
        """Asks the controller how far the drain of one instance is."""
        operation: DrainOperation = await self._call("drain_operation", instance_id)
        return operation

    async def undrain(self, instance_id: int) -> None:
        """Asks the controller to fill a drained slot again."""
        await self._call("undrain", instance_id)


class RouteWatcher:
    """Follows the routing table. While the controller is away the last table stays in use."""

    def __init__(
        self,
        source: RoutingSource,
        on_table: Callable[[RoutingTable], None],
        on_controller: Callable[[bool], None] = lambda up: None,
    ) -> None:
        self._source, self._on_table, self._on_controller = source, on_table, on_controller
        self.table = EMPTY_TABLE
        self.controller_up = False
        self.is_superseded = False  # a controller that this ingress cannot reach has taken over

    async def run(self) -> None:
        """Runs until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(POLL_TIMEOUT_S + GRACE_S):
                    table = await self._source.routing(self.table.version, POLL_TIMEOUT_S)
            except (EngineError, TimeoutError) as error:
                self.is_superseded = isinstance(error, SupersededError)
                self._set_up(False, str(error) or "no answer")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                continue
            pause_s = FIRST_PAUSE_S
            self.is_superseded = False
            self._set_up(True, "")
            if table.version > self.table.version:
                self._on_table(table)  # before it counts as known: where this fails, the table comes again
                self.table = table

    def _set_up(self, up: bool, why: str) -> None:
        if up != self.controller_up:
            logger.log(logging.INFO if up else logging.WARNING, "controller %s %s", "answers" if up else "away:", why)
        self.controller_up = up
        self._on_controller(up)
