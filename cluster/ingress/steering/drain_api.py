"""`/cluster/drain` and `/cluster/instances/{id}/drain`: ending the application, or one instance, gently."""

from collections.abc import Callable

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ingress.guards.body import parse_object
from pengserve.cluster.ingress.routing.routes import RoutingSource
from pengserve.cluster.ingress.steering.asking import CONTROLLER_TIMEOUT_S, asking_controller
from pengserve.planners.types.codec import to_data

MAX_DRAIN_S = 3600.0
DEFAULT_DRAIN_S = 60.0
MAX_INSTANCE_DIGITS = 6


def drain_router(source: RoutingSource, start_draining: Callable[[], None]) -> APIRouter:
    """The routes. `start_draining` is called before the whole application drains."""
    router = APIRouter()

    @router.post("/cluster/drain")
    async def drain(request: Request) -> JSONResponse:
        timeout_s = await _timeout_s(request)
        start_draining()
        async with asking_controller(timeout_s + CONTROLLER_TIMEOUT_S):
            return JSONResponse({"drained": await source.drain(timeout_s)})

    @router.post("/cluster/instances/{instance}/drain")
    async def drain_instance(instance: str, request: Request) -> JSONResponse:
        instance_id, timeout_s = _instance_id(instance), await _timeout_s(request)
        async with asking_controller(CONTROLLER_TIMEOUT_S, "instance"):
            return JSONResponse(to_data(await source.drain_instance(instance_id, timeout_s)))

    @router.get("/cluster/instances/{instance}/drain")
    async def drain_operation(instance: str) -> JSONResponse:
        async with asking_controller(CONTROLLER_TIMEOUT_S, "instance"):
            return JSONResponse(to_data(await source.drain_operation(_instance_id(instance))))

    @router.post("/cluster/instances/{instance}/undrain")
    async def undrain(instance: str) -> JSONResponse:
        async with asking_controller(CONTROLLER_TIMEOUT_S, "instance"):
            await source.undrain(_instance_id(instance))
            return JSONResponse({"undrained": True})

    return router


def _instance_id(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > MAX_INSTANCE_DIGITS:
        raise RequestRefused(400, "instance: the number of an instance is expected, such as 1", param="instance")
    return int(text)


async def _timeout_s(request: Request) -> float:
    body = await request.body()
    value = (parse_object(body) if body else {}).get("timeout_s", DEFAULT_DRAIN_S)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_DRAIN_S:
        raise RequestRefused(
            400, f"timeout_s: a number of seconds from 0 to {MAX_DRAIN_S:g} is accepted", param="timeout_s"
        )
    return float(value)
