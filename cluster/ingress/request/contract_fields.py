"""Where a request says what it asks for: fields of its body, and headers of ours and of other systems.

| purpose | body | headers |
|---|---|---|
| class | `service_tier` | `x-llm-d-inference-objective`; `x-gateway-...` and `x-dynamo-inference-objective` |
| priority | `priority` | `x-vllm-priority`; `x-dynamo-request-priority`, negated |
| SLO | `slo` | `x-llm-d-slo-ttft-ms`, `x-llm-d-slo-tpot-ms`, `x-slo-ttft-ms`, `x-slo-tpot-ms`, `x-slo-tbt-ms` |
| queue limit | | `x-pengserve-queue-timeout-ms`; `x-llm-d-inference-ttl`, a duration such as `1500ms` or `2s` |
| session | `session_id` | see `request_options` |
| tenant | | `x-pengserve-tenant`, `x-llm-d-inference-fairness-id`, `x-gateway-inference-fairness-id` |

The body beats headers. Two headers of one purpose must agree.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, Field, ValidationError

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.planners.types.contract import Pacing, SloPolicy

MAX_TTFT_MS = 3_600_000
MAX_TBT_MS = 60_000
MAX_QUEUE_MS = 3_600_000
PRIORITY_BITS = 31  # of a priority's absolute value

CLASS_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective", "x-dynamo-inference-objective")
PRIORITY_HEADER, NEGATED_PRIORITY_HEADER = "x-vllm-priority", "x-dynamo-request-priority"
TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TBT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms", "x-slo-tbt-ms")
QUEUE_HEADER, TTL_HEADER = "x-pengserve-queue-timeout-ms", "x-llm-d-inference-ttl"
TENANT_HEADER = "x-pengserve-tenant"
TENANT_HEADERS = (TENANT_HEADER, "x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
HEADERS = frozenset(
    {
        *CLASS_HEADERS,
        PRIORITY_HEADER,
        NEGATED_PRIORITY_HEADER,
        *TTFT_HEADERS,
        *TBT_HEADERS,
        QUEUE_HEADER,
        TTL_HEADER,
        *TENANT_HEADERS,
    }
)
FIELDS = ("slo", "service_tier", "priority")

_MS = "a number of milliseconds from 1 to {:,}"
_ALLOWED = {
    "slo": "an object with any of ttft_ms, tbt_ms, policy and pacing",
    "slo.ttft_ms": _MS.format(MAX_TTFT_MS),
    "slo.tbt_ms": _MS.format(MAX_TBT_MS),
    "slo.policy": " or ".join(SloPolicy),
    "slo.pacing": " or ".join(Pacing),
    "service_tier": "a string",
    "priority": f"a whole number from -{1 << PRIORITY_BITS:,} to {1 << PRIORITY_BITS:,}",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_WHOLE = re.compile(r"[+-]?\d{1,10}")
_DURATION = re.compile(r"(?:\d{1,9}(?:\.\d{1,9})?(?:ms|s|m|h))+")
_DURATION_PART = re.compile(r"([\d.]+)(ms|s|m|h)")
_UNIT_MS = {"ms": 1.0, "s": 1e3, "m": 6e4, "h": 3.6e6}

T = TypeVar("T")


class SloFields(BaseModel, extra="forbid", strict=True, frozen=True):
    """`slo` of a body."""

    ttft_ms: float | None = Field(default=None, ge=1, le=MAX_TTFT_MS)
    tbt_ms: float | None = Field(default=None, ge=1, le=MAX_TBT_MS)
    policy: Literal["best_effort", "reject"] | None = None
    pacing: Literal["none", "steady"] | None = None


class BodyFields(BaseModel, extra="ignore", strict=True, frozen=True):
    """Fields of a body that are about how it is served."""

    slo: SloFields | None = None
    service_tier: str | None = Field(default=None, max_length=128)
    priority: int | None = Field(default=None, ge=-(1 << PRIORITY_BITS), le=1 << PRIORITY_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value, and the field or header that it came in."""

    value: Any
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for itself, each with where it says so; None where it does not."""

    service_class: Given | None = None
    priority: Given | None = None
    ttft_ms: Given | None = None
    tbt_ms: Given | None = None
    policy: Given | None = None
    pacing: Given | None = None
    queue_ms: Given | None = None
    tenant: Given | None = None


NOTHING = Asked()


def known_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Those of a request's headers that are read here. One pass, as a look-up in Starlette's headers is one too."""
    return {name: value.strip() for name, value in headers.items() if name in HEADERS}


def read(body: Mapping[str, Any], headers: Mapping[str, str]) -> Asked:
    """What `body` and `known_headers` ask for.

    Raises:
        RequestRefused: 400, naming the field or header and what is allowed.
    """
    has_fields = any(body.get(name) is not None for name in FIELDS)
    if not headers and not has_fields:
        return NOTHING
    fields = _body_fields(body) if has_fields else BodyFields()
    slo = fields.slo or SloFields()
    ttft, tbt = _MS.format(MAX_TTFT_MS), _MS.format(MAX_TBT_MS)
    return Asked(
        service_class=_body(fields.service_tier, "service_tier") or _header(headers, CLASS_HEADERS, _name, "a name"),
        priority=_body(fields.priority, "priority") or _priority_header(headers),
        ttft_ms=_body(slo.ttft_ms, "slo.ttft_ms") or _header(headers, TTFT_HEADERS, _ms(MAX_TTFT_MS), ttft),
        tbt_ms=_body(slo.tbt_ms, "slo.tbt_ms") or _header(headers, TBT_HEADERS, _ms(MAX_TBT_MS), tbt),
        policy=_body(slo.policy, "slo.policy"),
        pacing=_body(slo.pacing, "slo.pacing"),
        queue_ms=_queue_header(headers),
        tenant=_header(headers, TENANT_HEADERS, _name, "1 to 128 letters, digits and ._:@/-"),
    )


def refuse(where: str, why: str) -> NoReturn:
    """Raises the 400 that names the field or header `where`."""
    raise RequestRefused(400, f"{where}: {why}", param=where)


def _body_fields(body: Mapping[str, Any]) -> BodyFields:
    try:
        return BodyFields.model_validate({name: body.get(name) for name in FIELDS})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"][:2])
    if first["type"] == "extra_forbidden":
        refuse(where[:80], f"there is no such field; {_ALLOWED['slo']} is accepted")
    refuse(where, f"{_ALLOWED[where]} is accepted, got {_short(first['input'])}")


def _body(value: Any, where: str) -> Given | None:
    return None if value is None else Given(value=value, where=where)


def _header(
    headers: Mapping[str, str], names: Iterable[str], parse: Callable[[str], T | None], allowed: str
) -> Given | None:
    """The value that headers of one purpose agree on."""
    found: Given | None = None
    for name in names:
        text = headers.get(name)
        if not text:
            continue
        value = parse(text)
        if value is None:
            refuse(name, f"{allowed} is accepted, got {_short(text)}")
        if found is not None and found.value != value:
            refuse(found.where, f"{found.where} and {name} contradict each other: send one of them, {allowed}")
        found = found or Given(value=value, where=name)
    return found


def _priority_header(headers: Mapping[str, str]) -> Given | None:
    allowed = _ALLOWED["priority"]
    plain = _header(headers, (PRIORITY_HEADER,), _whole, allowed)
    negated = _header(headers, (NEGATED_PRIORITY_HEADER,), lambda text: _negated(_whole(text)), allowed)
    return _agreed(plain, negated, f"{NEGATED_PRIORITY_HEADER} counts the other way round, {allowed} is accepted")


def _queue_header(headers: Mapping[str, str]) -> Given | None:
    allowed = _MS.format(MAX_QUEUE_MS)
    plain = _header(headers, (QUEUE_HEADER,), _ms(MAX_QUEUE_MS), allowed)
    ttl = _header(headers, (TTL_HEADER,), _duration_ms, "a duration such as 1500ms or 2s, of at most an hour,")
    return _agreed(plain, ttl, f"{allowed} is accepted")


def _agreed(one: Given | None, other: Given | None, allowed: str) -> Given | None:
    if one is not None and other is not None and one.value != other.value:
        refuse(one.where, f"{one.where} and {other.where} contradict each other: send one of them; {allowed}")
    return one or other


def _ms(most: int) -> Callable[[str], float | None]:
    def parse(text: str) -> float | None:
        value = float(text) if _NUMBER.fullmatch(text) else 0.0
        return value if 1 <= value <= most else None

    return parse


def _duration_ms(text: str) -> float | None:
    """A duration as Go writes it; a number alone counts milliseconds."""
    if _NUMBER.fullmatch(text):
        return _ms(MAX_QUEUE_MS)(text)
    if len(text) > 64 or not _DURATION.fullmatch(text):
        return None
    value = sum(float(number) * _UNIT_MS[unit] for number, unit in _DURATION_PART.findall(text))
    return value if 1 <= value <= MAX_QUEUE_MS else None


def _whole(text: str) -> int | None:
    value = int(text) if _WHOLE.fullmatch(text) else None
    return value if value is not None and abs(value) <= 1 << PRIORITY_BITS else None


def _negated(value: int | None) -> int | None:
    return None if value is None else -value


def _name(text: str) -> str | None:
    return text if _NAME.fullmatch(text) else None


def _short(value: object) -> str:
    return f'"{value[:40]}"' if isinstance(value, str) else str(value)[:40]
