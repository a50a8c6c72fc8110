"""The controller actor as a `RoutingSource`: found again whenever it was replaced."""

import asyncio
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError, RayTaskError

from pengserve.planners.types.errors import EngineError, PengServeError
from pengserve.planners.types.events import Event
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import ClusterSnapshot, Demand, RoutingTable


class RayRoutingSource:
    """Calls a controller through whatever handle `resolve` finds. A failed call forgets the handle."""

    def __init__(self, resolve: Callable[[], Any]) -> None:
        """`resolve` may block, and raises ValueError while there is no controller."""
        self._resolve = resolve
        self._handle: Any = None

    async def routing(self, known_version: int, timeout_s: float) -> RoutingTable:
        """See `RoutingSource`."""
        table: RoutingTable = await self._call("routing", known_version, timeout_s)
        return table

    async def snapshot(self) -> ClusterSnapshot:
        """See `RoutingSource`."""
        snapshot: ClusterSnapshot = await self._call("snapshot")
        return snapshot

    async def events(self, after: int, limit: int) -> tuple[Event, ...]:
        """See `RoutingSource`."""
        events: tuple[Event, ...] = await self._call("events", after, limit)
        return events

    async def report_lost(self, key: InstanceKey, why: str) -> None:
        """See `RoutingSource`."""
        await self._call("report_lost", key, why)

    async def report_demand(self, client_id: str, demand: Demand) -> None:
        """See `RoutingSource`."""
        await self._call("report_demand", client_id, demand)

    async def set_layout(self, target: LayoutTarget) -> None:
        """See `RoutingSource`."""
        await self._call("set_layout", target)

    async def auto_layout(self) -> None:
        """See `RoutingSource`."""
        await self._call("auto_layout")

    async def drain(self, timeout_s: float) -> bool:
        """See `RoutingSource`."""
        return bool(await self._call("drain", timeout_s))

    async def _call(self, method: str, *arguments: Any) -> Any:
        handle = self._handle
        try:
            if handle is None:
                handle = self._handle = await asyncio.to_thread(self._resolve)
            return await getattr(handle, method).remote(*arguments)
        except (RayError, ValueError) as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, PengServeError):
                raise error.cause from None  # it did answer, and said no
            if self._handle is handle:
                self._handle = None
            raise EngineError(f"the controller does not answer: {type(error).__name__}") from error
