"""Asking the controller on behalf of a client that waits for an HTTP answer."""

import asyncio

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.planners.types.errors import EngineError

CONTROLLER_TIMEOUT_S = 10.0


class asking_controller:
    """503 where the controller does not answer within `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self._timeout.__aexit__(type(error) if error else None, error, None)
        except TimeoutError as late:
            error = late
        if isinstance(error, EngineError | TimeoutError):
            raise RequestRefused(503, "The controller does not answer; serving goes on without it.") from error
