"""`/cluster/layout`: what shape the cluster has, and what shape it should have."""

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ingress.guards.body import parse_object
from pengserve.cluster.ingress.routing.routes import RoutingSource
from pengserve.cluster.ingress.steering.asking import CONTROLLER_TIMEOUT_S, asking_controller
from pengserve.planners.groups import complete, expand, groups_for, pipelines_for
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.layout import Group, GroupKind, degree_of, parse_groups
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import ClusterSnapshot, LayoutView
from pengserve.planners.types.strategy import SwitchStrategy

AUTO = "auto"
WIDEST = (GroupKind.TP.value, GroupKind.PP.value)
MAX_LAYOUT_CHARS = 16384  # names of some thousand groups


def layout_router(source: RoutingSource) -> APIRouter:
    """The routes. PUT answers at once, with the layout as it is then; the switches follow."""
    router = APIRouter()

    @router.get("/cluster/layout")
    async def layout() -> JSONResponse:
        async with asking_controller(CONTROLLER_TIMEOUT_S):
            return JSONResponse(to_data(LayoutView.of(await source.snapshot())))

    @router.put("/cluster/layout")
    async def set_layout(request: Request) -> JSONResponse:
        text, strategy = _read(parse_object(await request.body()))
        async with asking_controller(CONTROLLER_TIMEOUT_S, "layout"):
            if text.lower() == AUTO:
                await source.auto_layout()
            else:
                target = _target(text, strategy, await source.snapshot())
                await source.set_layout(target)
            return JSONResponse(to_data(LayoutView.of(await source.snapshot())))

    return router


def _read(data: Mapping[str, Any]) -> tuple[str, SwitchStrategy]:
    if unknown := sorted(data.keys() - {"layout", "strategy"}):
        raise RequestRefused(400, f"{unknown[0]} is not accepted: give layout, and strategy.", param=unknown[0])
    text, strategy = data.get("layout"), data.get("strategy", SwitchStrategy.CARRY.value)
    if not isinstance(text, str) or not 0 < len(text.strip()) <= MAX_LAYOUT_CHARS:
        raise RequestRefused(
            400, 'layout: a text is expected, such as "dp", "tp2", "tp2@(0,1) dp@(2)" or "auto"', param="layout"
        )
    try:
        return text.strip(), SwitchStrategy(strategy)
    except ValueError:
        names = ", ".join(SwitchStrategy)
        raise RequestRefused(400, f"strategy: one of {names} is accepted", param="strategy") from None


def _target(text: str, strategy: SwitchStrategy, snapshot: ClusterSnapshot) -> LayoutTarget:
    try:
        if "@" in text:
            # The controller knows which groups the hardware allows, also while a member is being replaced.
            groups = complete(parse_groups(text.lower()), snapshot.ranks)
        else:
            groups = expand(text, _possible(text.lower(), snapshot), snapshot.ranks)
        return LayoutTarget(groups=groups, strategy=strategy)
    except ValueError as error:
        raise _refused(error) from None


def _possible(options: str, snapshot: ClusterSnapshot) -> tuple[Group, ...]:
    """The groups that a short name stands for. One whose member is being replaced counts: it forms when it is back."""
    lanes = [lane for instance in snapshot.instances for lane in instance.lanes if lane.shape != GroupKind.DP]
    cannot = {lane.shape for lane in lanes if lane.capacity is None} if options in WIDEST else set()
    shapes = {lane.shape for lane in lanes} - cannot
    degrees = {degree_of(shape) for shape in shapes if shape.startswith(GroupKind.TP)}
    stages = [degree_of(shape) for shape in shapes if shape.startswith(GroupKind.PP)]
    places = {i.instance_id: i.device.node_id for i in snapshot.instances if i.device.pid or i.device.node_id}
    if len(places) < len(snapshot.ranks):
        return snapshot.groups
    return groups_for(snapshot.ranks, places, degrees) + pipelines_for(snapshot.ranks, places, max(stages, default=1))


def _refused(error: Exception) -> RequestRefused:
    return RequestRefused(400, str(error), param="layout")
