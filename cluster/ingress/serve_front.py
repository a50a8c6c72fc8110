"""What stands in front of Ray Serve's own HTTP code, in the process that listens.

Serve reads some request headers before the application is called. By them any client could make its request
unstoppable, have its stream cut off without an error, or break Serve, which expects UTF-8. They are taken out here.

Serve calls `middlewares` where `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names it in the environment of the process
that listens: an ingress replica behind HAProxy, a proxy actor else. No import of vLLM or of Ray: a proxy needs neither.
"""

import json
import logging
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pengserve.cluster.ingress.guards import connection_guard
from pengserve.cluster.ingress.request import request_ids

logger = logging.getLogger(__name__)

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
IMPORT_PATH = f"{__name__}.middlewares"

# Names in lower case, with "-" for "_": Serve takes some of them either way.
DROPPED = frozenset(
    {
        "x-request-disconnect-disabled",  # "?1": the request runs on when its client has left
        "x-request-timeout-seconds",  # ends the answer in the middle
        "serve-multiplexed-model-id",  # chooses a replica
        "x-session-id",  # the same; the application gets it under another name
    }
)
SESSION_HEADER = b"x-pengserve-session"  # what `request_options` reads in place of Serve's x-session-id
DROPPED_PREFIX = "x-serve-router-"
DECODED = frozenset({"traceparent", "tracestate"})  # read as UTF-8 where tracing is on

_INTERNAL = {"message": "The server failed to process this request.", "type": "InternalServerError", "param": None}


def middlewares() -> list[Middleware]:
    """For Serve: what it puts around its own HTTP application. Guards this process's connections as well."""
    connection_guard.install()
    return [Middleware(ServeFront)]


class ServeFront:
    """ASGI middleware: takes Serve's headers out of requests, and puts exactly one request id on each answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(raw=[_renamed(pair) for pair in scope["headers"] if _is_kept(*_renamed(pair))])
        request_id = request_ids.accept_or_make(headers.get(request_ids.HEADER, ""))
        headers[request_ids.HEADER] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message.setdefault("headers", [])
                MutableHeaders(scope=message)[request_ids.HEADER] = request_id
            await send(message)

        try:
            await self._app({**scope, "headers": headers.raw}, receive, send_with_id)
        except Exception:
            if started or scope["type"] != "http":
                raise
            logger.exception("Ray Serve failed on request %s", request_id)
            await _send_internal_error(send_with_id)


def _renamed(header: tuple[bytes, bytes]) -> tuple[bytes, bytes]:
    is_session = header[0].lower() == b"x-session-id" and header[1].isascii()
    return (SESSION_HEADER, header[1]) if is_session else header


def _is_kept(raw_name: bytes, value: bytes) -> bool:
    if not raw_name.isascii():
        return False
    name = raw_name.decode().lower().replace("_", "-")
    if name in DROPPED or name.startswith(DROPPED_PREFIX):
        return False
    return name not in DECODED or value.isascii()


async def _send_internal_error(send: Send) -> None:
    body: Any = json.dumps({"error": {**_INTERNAL, "code": 500}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 500, "headers": headers})
    await send({"type": "http.response.body", "body": body})
