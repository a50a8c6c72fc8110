"""`/cluster/requests/{id}/priority`, and the same of sessions: requests in flight become more or less urgent.

    PUT {"priority": -1}
    PUT {"priority": -1, "tenant": "acme"}      refused where the request is another tenant's: for gateways

The new priority counts from the next step of the instance on which the request is (FastSwitch section 4.4), at any rate
of updates: each costs a look over this ingress's requests and a small frame. Only the ingress that holds a request can
change it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ingress.guards.body import parse_object
from pengserve.cluster.ingress.in_flight.records import RequestBook
from pengserve.cluster.ingress.request.contract_fields import PRIORITY_BITS
from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.contract import BUILT_IN_CLASSES, DEFAULT_CLASS, ServiceClass
from pengserve.planners.types.tenants import TenantUse

_FIELDS = frozenset({"priority", "tenant"})
_GONE = "no {} {!r} is in flight at this ingress: it has ended, or another ingress has it"


def priority_router(
    book: Callable[[], RequestBook], classes: Mapping[str, ServiceClass], *, goes_by_priority: bool
) -> APIRouter:
    """The routes. `goes_by_priority`: vLLM's schedulers heed priorities."""
    router = APIRouter()

    @router.put("/cluster/requests/{request_id}/priority")
    async def of_request(request_id: str, request: Request) -> JSONResponse:
        named = re.compile(rf"(?:^|[-_]){re.escape(request_id)}(?:-\d+)?$")  # as `pengserve why` reads ids
        return change(await request.body(), lambda record: bool(named.search(record.request_id)), "request", request_id)

    @router.put("/cluster/sessions/{session:path}/priority")
    async def of_session(session: str, request: Request) -> JSONResponse:
        return change(
            await request.body(), lambda record: record.options.contract.session == session, "session", session
        )

    def change(body: bytes, is_meant: Callable[[RequestRecord], bool], kind: str, name: str) -> JSONResponse:
        if not goes_by_priority:
            raise RequestRefused(
                400,
                "priorities change nothing where requests begin as they come: set engine.scheduling_policy to"
                " priority, or fairness.enabled",
            )
        priority, tenant = _read(parse_object(body))
        found = [record for record in book().records() if is_meant(record)]
        if not found:
            raise RequestRefused(404, _GONE.format(kind, name[:128]), param=kind)
        _check(found, priority, tenant, classes)
        for record in found:
            book().prioritize(record, priority)
        return JSONResponse({"requests": len(found), "priority": priority})

    return router


def tenants_router(uses: Callable[[], Iterable[TenantUse]]) -> APIRouter:
    """`GET /cluster/tenants`: what tenants and classes have and were served at this ingress."""
    router = APIRouter()

    @router.get("/cluster/tenants")
    async def tenants() -> JSONResponse:
        return JSONResponse({"tenants": to_data(tuple(uses()))})

    return router


def _read(data: Mapping[str, Any]) -> tuple[int, str | None]:
    if unknown := sorted(set(data) - _FIELDS):
        raise RequestRefused(400, f"{unknown[0][:40]}: only priority and tenant are accepted", param=unknown[0][:40])
    priority, tenant = data.get("priority"), data.get("tenant")
    most = 1 << PRIORITY_BITS
    if type(priority) is not int or not -most <= priority <= most:
        raise RequestRefused(400, f"priority: a whole number from -{most:,} to {most:,} is expected", param="priority")
    if tenant is not None and not isinstance(tenant, str):
        raise RequestRefused(400, "tenant: a string is expected", param="tenant")
    return priority, tenant


def _check(
    records: Iterable[RequestRecord], priority: int, tenant: str | None, classes: Mapping[str, ServiceClass]
) -> None:
    """All may have it, or none gets it."""
    for record in records:
        contract = record.options.contract
        if tenant is not None and contract.tenant != tenant:
            raise RequestRefused(403, "tenant: the request belongs to another tenant", param="tenant")
        found = classes.get(contract.service_class) or BUILT_IN_CLASSES[DEFAULT_CLASS]
        if not found.allows(priority):
            low = "any" if found.min_priority is None else found.min_priority
            high = "any" if found.max_priority is None else found.max_priority
            raise RequestRefused(
                400,
                f"priority: the request's class {found.name} may have priorities from {low} to {high}, got {priority}",
                param="priority",
            )
