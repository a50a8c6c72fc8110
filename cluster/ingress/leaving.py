"""Handlers that end when their client leaves.

vLLM's own `with_cancellation` runs a handler in a task and cancels that task where `receive` tells that the client has
gone. Where the server cancels the request itself, as Ray Serve does, vLLM's wrapper is cancelled and leaves the task
behind: the request runs to its end for a client that has gone. The wrapper here ends the task in both cases.
"""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pengserve.cluster.ingress.vllm_openai_seam import with_cancellation

CLIENT_CLOSED_REQUEST = 499  # nginx's status for it; the client never sees the answer

Handler = Callable[..., Awaitable[Any]]


def ends_with_client(endpoint: Handler) -> Handler:
    """`endpoint`, one of vLLM's that takes `raw_request`, so that nothing of it outlives its client."""
    handler = _without_vllm_wrapper(endpoint)

    # FastAPI reads the signature through `__wrapped__`.
    @functools.wraps(handler)
    async def wrapper(*args: Any, raw_request: Request, **kwargs: Any) -> Any:
        answering = asyncio.ensure_future(handler(*args, raw_request=raw_request, **kwargs))
        listening = asyncio.create_task(_until_gone(raw_request))
        try:
            await asyncio.wait((answering, listening), return_when=asyncio.FIRST_COMPLETED)
            return answering.result() if answering.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            answering.cancel()
            listening.cancel()
            await asyncio.gather(answering, listening, return_exceptions=True)

    return wrapper


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def is_wrapped_by_vllm(endpoint: Handler) -> bool:
    """Whether `with_cancellation` made `endpoint`."""
    return getattr(endpoint, "__code__", None) is with_cancellation(_until_gone).__code__


def _without_vllm_wrapper(endpoint: Handler) -> Handler:
    return endpoint.__wrapped__ if is_wrapped_by_vllm(endpoint) else endpoint  # type: ignore[attr-defined]
