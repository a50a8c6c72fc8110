"""From what a request asks for to the `Contract` that it is served by."""

from collections.abc import Mapping
from typing import Any

from pengserve.cluster.ingress.request import contract_fields
from pengserve.cluster.ingress.request.contract_fields import TENANT_HEADER, Asked, refuse
from pengserve.planners.types.contract import (
    DEFAULT_CLASS,
    NO_CONTRACT,
    Contract,
    Pacing,
    ServiceClass,
    Slo,
    SloPolicy,
)

# OpenAI's tiers that name no class: "auto" leaves the choice to the server, "scale" is a kind of contract with OpenAI.
CHOSEN_BY_SERVER = frozenset({"auto", "scale"})
VLLM_TIERS = frozenset({"auto", "default", "flex", "scale", "priority"})  # vLLM's models accept no others


class ContractReader:
    """Reads contracts, in a cluster with these classes."""

    def __init__(self, classes: Mapping[str, ServiceClass], *, is_tenant_trusted: bool = False) -> None:
        """`is_tenant_trusted`: a proxy in front sets the tenant's header, and lets no client's own through."""
        self._classes, self._is_tenant_trusted = classes, is_tenant_trusted

    def read(self, headers: Mapping[str, str], body: Mapping[str, Any], *, key_id: str, session: str) -> Contract:
        """The contract of a request with the API key `key_id` ("" for none) and its session.

        Raises:
            RequestRefused: 400, naming the fields and what is allowed.
        """
        known = contract_fields.known_headers(headers)
        asked = contract_fields.read(body, known)
        found = self._class(asked)
        slo = _slo(asked, found, is_stream=bool(body.get("stream")))
        tenant = self._tenant(asked, key_id)
        if asked is contract_fields.NOTHING and slo is None and not tenant and not session and not found.priority:
            return NO_CONTRACT
        return Contract(
            service_class=found.name,
            priority=_priority(asked, found),
            slo=slo,
            queue_limit_s=None if asked.queue_ms is None else asked.queue_ms.value / 1e3,
            tenant=tenant,
            session=session,
        )

    def _class(self, asked: Asked) -> ServiceClass:
        given = asked.service_class
        if given is None:
            return self._classes[DEFAULT_CLASS]
        found = self._classes.get(given.value)
        if found is None and given.value in CHOSEN_BY_SERVER:
            return self._classes[DEFAULT_CLASS]
        if found is None:
            names = ", ".join(sorted(self._classes))
            refuse(given.where, f'there is no class "{given.value[:40]}"; {names} are configured')
        return found

    def _tenant(self, asked: Asked, key_id: str) -> str:
        given = asked.tenant
        if given is None or (not self._is_tenant_trusted and given.where != TENANT_HEADER):
            return key_id  # what a gateway in front says to gateways is no fault of the client's
        if not self._is_tenant_trusted:
            refuse(given.where, "this server tells tenants apart by their API keys and takes the header from no client")
        return str(given.value)


def without_own_fields(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The body as vLLM may see it; None where it may see all of it."""
    is_own_tier = body.get("service_tier") is not None and body["service_tier"] not in VLLM_TIERS
    if "slo" not in body and not is_own_tier:
        return None
    return {k: v for k, v in body.items() if k != "slo" and not (k == "service_tier" and is_own_tier)}


def _priority(asked: Asked, found: ServiceClass) -> int:
    if asked.priority is None:
        return found.priority
    value = int(asked.priority.value)
    if not found.allows(value):
        where = asked.priority.where
        by = asked.service_class.where if asked.service_class is not None else "service_tier"
        refuse(where, f"the class {found.name} ({by}) may have {_range(found)}, got {value}")
    return value


def _range(found: ServiceClass) -> str:
    low = "any" if found.min_priority is None else str(found.min_priority)
    high = "any" if found.max_priority is None else str(found.max_priority)
    return f"priorities from {low} to {high}"


def _slo(asked: Asked, found: ServiceClass, *, is_stream: bool) -> Slo | None:
    """What the request asks for, and of its class what it leaves open.

    Only streams are paced: any other answer goes when it is whole, and a pause is not hidden by what it has.
    """
    base = found.slo or Slo()
    ttft_s = base.ttft_s if asked.ttft_ms is None else asked.ttft_ms.value / 1e3
    tbt_s = base.tbt_s if asked.tbt_ms is None else asked.tbt_ms.value / 1e3
    policy = base.policy if asked.policy is None else SloPolicy(asked.policy.value)
    pacing = base.pacing if asked.pacing is None else Pacing(asked.pacing.value)
    if policy is SloPolicy.REJECT and ttft_s is None:
        refuse(
            "slo.policy",
            f"reject needs slo.ttft_ms, a number from 1 to {contract_fields.MAX_TTFT_MS:,}, to be predicted against",
        )
    if pacing is Pacing.STEADY and tbt_s is None:
        refuse(
            "slo.pacing",
            f"steady needs slo.tbt_ms, a number from 1 to {contract_fields.MAX_TBT_MS:,}, the time of one token",
        )
    if ttft_s is None and tbt_s is None:
        return None
    return Slo(ttft_s=ttft_s, tbt_s=tbt_s, policy=policy, pacing=pacing if is_stream else Pacing.NONE)
