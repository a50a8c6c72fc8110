"""The controller actor as a `RoutingSource`: found again whenever it was replaced."""

import asyncio
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayError, RayTaskError

from pengserve.cluster.ingress.routing.routes import CalledSource
from pengserve.planners.types.errors import EngineError, PengServeError, SupersededError

ANSWER_TIMEOUT_S = 30.0  # for each call, beyond the time that it asks the controller to wait

_WAITS = {"routing": 1, "drain": 0}  # which argument says for how long the controller may wait


class RayRoutingSource(CalledSource):
    """Calls a controller through the handle that `resolve` finds. A failed call forgets the handle."""

    def __init__(self, resolve: Callable[[], Any]) -> None:
        """`resolve` may block, and raises ValueError while there is no controller."""
        self._resolve = resolve
        self._handle: Any = None

    async def _call(self, method: str, *arguments: Any) -> Any:
        handle = self._handle
        wait_s = float(arguments[_WAITS[method]]) if method in _WAITS else 0.0
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S + wait_s):
                if handle is None:
                    handle = self._handle = await asyncio.to_thread(self._resolve)
                return await getattr(handle, method).remote(*arguments)
        except (RayError, ValueError, TimeoutError) as error:
            if isinstance(error, RayTaskError) and isinstance(error.cause, PengServeError):
                if isinstance(error.cause, SupersededError):
                    self._forget(handle)
                raise error.cause from None  # it did answer, and said no
            self._forget(handle)
            raise EngineError(f"the controller does not answer: {type(error).__name__}") from error

    def _forget(self, handle: Any) -> None:
        """Looks for the controller anew at the next call."""
        if self._handle is handle:
            self._handle = None
