"""What one HTTP request says about how it is to be served, beside its body's own fields."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.planners.dispatch import DispatchOptions

PARALLELISM_HEADER = "x-pengserve-parallelism"
MAX_HEADER_CHARS = 32
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


NO_OPTIONS = RequestOptions()

current_deadline_s: ContextVar[float | None] = ContextVar("current_deadline_s", default=None)
"""When the HTTP request must be answered, in the event loop's time; None: no limit."""

current_options: ContextVar[RequestOptions] = ContextVar("current_wish", default=NO_OPTIONS)


def read_options(header: str | None, body: Mapping[str, Any], degrees: Iterable[int]) -> RequestOptions:
    """The wish of a request with this `x-pengserve-parallelism` header, in a cluster that can form `degrees`.

    Raises:
        RequestRefused: 400: no such parallelism, or none that this cluster can form. Names the header.
    """
    has_length = any(body.get(name) is not None for name in LENGTH_FIELDS)
    if header is None:
        return RequestOptions(has_length=has_length)
    try:
        return RequestOptions(
            degree=DispatchOptions.parse(header[:MAX_HEADER_CHARS], degrees).degree, has_length=has_length
        )
    except ValueError as error:
        raise RequestRefused(400, f"{PARALLELISM_HEADER}: {error}", param=PARALLELISM_HEADER) from None
