"""Asking the controller on behalf of a client that waits for an HTTP answer."""

import asyncio

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.planners.types.errors import EngineError, PlanError

CONTROLLER_TIMEOUT_S = 10.0


class asking_controller:
    """503 where the controller does not answer within `timeout_s`; 400 where it refuses what `param` asks for."""

    def __init__(self, timeout_s: float, param: str | None = None) -> None:
        self._timeout, self._param = asyncio.timeout(timeout_s), param

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self._timeout.__aexit__(type(error) if error else None, error, None)
        except TimeoutError as late:
            error = late
        if isinstance(error, PlanError) and self._param is not None:
            raise RequestRefused(400, str(error), param=self._param) from None
        if isinstance(error, EngineError | TimeoutError):
            raise RequestRefused(503, "The controller does not answer; serving goes on without it.") from error
