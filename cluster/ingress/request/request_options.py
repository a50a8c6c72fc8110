"""What one HTTP request says about how it is to be served, beside its body's own fields."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ingress.request.contract import ContractReader
from pengserve.cluster.ingress.request.request_ids import MAX_ID_CHARS
from pengserve.planners.dispatch import DispatchOptions
from pengserve.planners.types.contract import BUILT_IN_CLASSES, NO_CONTRACT, Contract

PARALLELISM_HEADER = "x-pengserve-parallelism"
MAX_HEADER_CHARS = 32
# Headers that name a session, as other systems do; `serve_front` passes the first on under the second's name.
SESSION_HEADERS = ("x-session-id", "x-pengserve-session", "x-dynamo-session-id")
CORRELATION_HEADER = "x-correlation-id"  # names one only where nothing else does: many tools put it on every request
# The fields of completions, chat and responses that bound an answer.
LENGTH_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """How a request wants to be served.

    `has_length` tells whether the client bounded the answer. If it did, the request goes only where all of it fits.
    If not, vLLM sets the bound to all that the widest group holds, and asking for that would make each such request
    want the widest group. So it goes wherever its prompt fits, and ends with "length" at the limit of where it runs.
    """

    degree: int | None = None  # 1 is dp, 2 and more tensor-parallel; None: any
    has_length: bool = True
    key_id: str = ""  # names the API key it came with, without telling it; "" where none is needed
    contract: Contract = NO_CONTRACT
    traceparent: str = ""  # W3C's header: the client's span; "" where it sent none, or traces are off


NO_OPTIONS = RequestOptions()

current_deadline_s: ContextVar[float | None] = ContextVar("current_deadline_s", default=None)
"""When the HTTP request must be answered, in the event loop's time; None: no limit."""

current_options: ContextVar[RequestOptions] = ContextVar("current_wish", default=NO_OPTIONS)


NO_CLASSES = ContractReader(BUILT_IN_CLASSES)


def read_options(
    headers: Mapping[str, str],
    body: Mapping[str, Any],
    degrees: Iterable[int],
    contracts: ContractReader = NO_CLASSES,
    key_id: str = "",
) -> RequestOptions:
    """The wishes of a request, in a cluster that can form `degrees`. Names of `headers` are in lower case.

    Raises:
        RequestRefused: 400: no parallelism that this cluster can form, two sessions, a bad name of one, or a contract
            that cannot be. Names the header or field.
    """
    has_length = any(body.get(name) is not None for name in LENGTH_FIELDS)
    return RequestOptions(
        degree=_degree(headers.get(PARALLELISM_HEADER), degrees),
        has_length=has_length,
        key_id=key_id,
        contract=contracts.read(headers, body, key_id=key_id, session=_session(headers, body)),
    )


def _degree(header: str | None, degrees: Iterable[int]) -> int | None:
    if header is None:
        return None
    try:
        return DispatchOptions.parse(header[:MAX_HEADER_CHARS], degrees).degree
    except ValueError as error:
        raise RequestRefused(400, f"{PARALLELISM_HEADER}: {error}", param=PARALLELISM_HEADER) from None


def _session(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """The body's `session_id`, or a header's. `body.check_common` has checked the body's length and characters."""
    value = body.get("session_id")
    if value is not None and not isinstance(value, str):
        raise RequestRefused(400, "session_id: a string is expected.", param="session_id")
    found = {"session_id": value} if value else {}
    for name in SESSION_HEADERS:
        header = headers.get(name, "").strip()
        if len(header) > MAX_ID_CHARS:
            raise RequestRefused(400, f"{name}: at most {MAX_ID_CHARS} characters are accepted.", param=name)
        if header:
            found[name] = header
    if len(set(found.values())) > 1:
        first = next(iter(found))
        other = next(name for name, value in found.items() if value != found[first])
        raise RequestRefused(400, f"{first} and {other} name two sessions: send one of them.", param=first)
    if found:
        return next(iter(found.values()))
    return headers.get(CORRELATION_HEADER, "").strip()[:MAX_ID_CHARS]
