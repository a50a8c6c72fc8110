"""`/live`, `/ready`, `/health`, `/metrics`, `/cluster/...`: for load balancers, scrapers, people and the SDK."""

from collections.abc import Callable

from fastapi import APIRouter, FastAPI, Response
from fastapi.responses import JSONResponse

from pengserve.cluster.ingress.errors import RequestRefused, error_response
from pengserve.cluster.ingress.routing.routes import RoutingSource
from pengserve.cluster.ingress.steering.asking import CONTROLLER_TIMEOUT_S, asking_controller
from pengserve.cluster.ingress.steering.drain_api import drain_router
from pengserve.cluster.ingress.steering.layout_api import layout_router
from pengserve.cluster.ingress.vllm_openai_seam import vllm_version
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.snapshot import RoutingTable

MAX_EVENTS = 1000


def cluster_router(
    *,
    source: RoutingSource,
    table: Callable[[], RoutingTable],
    why_not_ready: Callable[[], str],
    start_draining: Callable[[], None],
    metrics_endpoint: Callable[[], tuple[bytes, str]] | None,
) -> APIRouter:
    """The routes. `why_not_ready` tells what is missing, or an empty string."""
    router = APIRouter()
    router.include_router(layout_router(source))
    router.include_router(drain_router(source, start_draining))

    @router.get("/live")
    async def live() -> JSONResponse:
        return JSONResponse({"live": True})

    @router.get("/ready")
    async def ready() -> JSONResponse:
        why = why_not_ready()
        headers = {"Retry-After": "1"} if why else None
        return JSONResponse({"ready": not why, "why": why}, status_code=503 if why else 200, headers=headers)

    # The next three as vLLM's own server has them, with a reason where it says none: load tools ask for them.
    @router.get("/health")
    @router.api_route("/ping", methods=["GET", "POST"])
    async def health() -> Response:
        if why := why_not_ready():
            return error_response(503, f"No request can be served now: {why}.", headers={"Retry-After": "1"})
        return Response()

    @router.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": vllm_version})

    @router.get("/metrics")
    async def metrics() -> Response:
        if metrics_endpoint is None:
            raise RequestRefused(404, "Metrics are exported elsewhere.")
        body, content_type = metrics_endpoint()
        return Response(body, headers={"Content-Type": content_type})

    @router.get("/cluster/status")
    async def status() -> JSONResponse:
        async with asking_controller(CONTROLLER_TIMEOUT_S):
            return JSONResponse(to_data(await source.snapshot()))

    @router.get("/cluster/events")
    async def events(after: int = 0, limit: int = 100) -> JSONResponse:
        if not 1 <= limit <= MAX_EVENTS:
            raise RequestRefused(400, f"limit: a number from 1 to {MAX_EVENTS} is accepted", param="limit")
        if not 0 <= after < 2**63:
            raise RequestRefused(400, "after: a sequence number is expected", param="after")
        async with asking_controller(CONTROLLER_TIMEOUT_S):
            return JSONResponse({"events": to_data(await source.events(after, limit))})

    @router.get("/cluster/routing")
    async def routing() -> JSONResponse:
        return JSONResponse(to_data(table()))

    return router


def attach_cluster_routes(app: FastAPI, router: APIRouter) -> None:
    """Adds the routes to `app`."""
    app.include_router(router, include_in_schema=False)
