"""The first thing a request meets: its id, its key, its size, its shape, and a place among those in flight.

Pure ASGI, so that streams pass through untouched. The body is read here, once, and handed on as one message.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.ingress.errors import OverloadedError, RequestRefused, respond
from pengserve.cluster.ingress.guards.admin import AdminDoor, bearer
from pengserve.cluster.ingress.guards.body import check_common, check_generation, parse_object
from pengserve.cluster.ingress.guards.body_reader import BodyReader, bounded, replay
from pengserve.cluster.ingress.guards.keys import KeyRing, key_id
from pengserve.cluster.ingress.in_flight.traffic import Places, Ticket, Traffic
from pengserve.cluster.ingress.request import request_ids
from pengserve.cluster.ingress.request.begun import current_begun, ending_with_block
from pengserve.cluster.ingress.request.contract import ContractReader, without_own_fields
from pengserve.cluster.ingress.request.kept import KeptAnswer, current_kept
from pengserve.cluster.ingress.request.request_options import (
    current_deadline_s,
    current_options,
    read_options,
)
from pengserve.cluster.ingress.tenants.tenants import Tenants
from pengserve.planners.types.cluster_id import CLUSTER_HEADER, cluster_id
from pengserve.planners.types.contract import by_name

logger = logging.getLogger(__name__)

MAX_TOKEN_BODY_BYTES = 1 << 20  # to count or turn round: their answers are as long, and made on the event loop
MAX_TOKENIZING = 64  # requests to count or turn round tokens at once
MAX_TRACEPARENT_CHARS = 256
LONG_TEXT_BYTES = 64 << 10  # of these one at a time: a thread tokenizes for all requests
GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
TOKEN_PATHS = frozenset({"/tokenize", "/detokenize"})
ADMIN_PREFIX = "/cluster/"
METRICS_PATH = "/metrics"

# Headers that vLLM reads itself: a trusted router's, and those that `request_options` has read and checked.
_DROPPED_HEADERS = frozenset({b"x-data-parallel-rank", b"x-vllm-priority", b"x-session-id", b"x-request-id"})
_EXPOSED_HEADERS = (request_ids.HEADER, "Retry-After")  # what scripts of another origin may read

current_ticket: ContextVar[Ticket | None] = ContextVar("current_ticket", default=None)


@dataclass(slots=True)
class _Exchange:
    """One request as the guard sees it."""

    scope: Scope
    headers: Headers
    request_id: str
    started: bool = False  # the head of the answer is out
    finished: bool = False  # and its end as well


class Guard:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: IngressConfig,
        traffic: Traffic,
        vocab_size: int,
        max_model_len: Callable[[], int] = lambda: 0,
        on_rejected: Callable[[str], None] = lambda reason: None,
        keys: KeyRing | None = None,
        admin: AdminDoor | None = None,
        tenants: Tenants | None = None,
        abort: Callable[[list[str]], None] = lambda request_ids: None,
    ) -> None:
        """`abort` ends what a request has left running on instances."""
        self._app, self._config, self._traffic, self._vocab_size = app, config, traffic, vocab_size
        self._max_model_len, self._on_rejected = max_model_len, on_rejected
        self._bodies = BodyReader()
        self._tokenizing = Places(MAX_TOKENIZING, "Too many texts wait to be tokenized. Try again later.")
        self._long_text = asyncio.Lock()
        self._keys = keys or KeyRing(config)
        self._admin = admin or AdminDoor(config, self._keys)
        self._tenants, self._abort = tenants or Tenants(config.fairness), abort
        self._cluster_id = cluster_id(config.instance.channel_token)
        self._contracts = ContractReader(by_name(config.classes), is_tenant_trusted=config.is_tenant_trusted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _without_trailing_slash(scope)
        headers = Headers(scope=scope)
        exchange = _Exchange(scope, headers, request_ids.accept_or_make(headers.get(request_ids.HEADER, "")))

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await self._answer(exchange, receive, send)

        await self._for_origin(exchange, answer)(scope, receive, self._noting(exchange, send))

    def _for_origin(self, exchange: _Exchange, answer: ASGIApp) -> ASGIApp:
        """`answer` with CORS where the request's origin may have it. A preflight needs no key then, as it has none."""
        allowed, origin = self._config.allowed_origins, exchange.headers.get("origin")
        is_admin = _path(exchange.scope).startswith(ADMIN_PREFIX)
        if is_admin or origin is None or not ("*" in allowed or origin.lower() in allowed):
            return answer
        return CORSMiddleware(
            answer,
            allow_origins=["*"] if "*" in allowed else [origin],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
        )

    async def _answer(self, exchange: _Exchange, receive: Receive, send: Send) -> None:
        scope = exchange.scope
        try:
            await self._serve(exchange, receive, send)
        except RequestRefused as refused:
            self._on_rejected(_REASONS.get(refused.status, "invalid"))
            await respond(refused)(scope, receive, send)
        except OverloadedError as overloaded:
            reason = "tenant" if overloaded.dropped_reason.startswith("tenant-") else "overload"
            self._on_rejected("no_instance" if self._traffic.is_draining else reason)
            await respond(overloaded)(scope, receive, send)
        except Exception as error:  # the last line: any failure gives the client an answer in shape
            if exchange.finished:
                return  # Starlette raises again what it has answered already
            if exchange.started:
                logger.exception("request %s failed in the middle of its answer", exchange.request_id)
                raise
            await respond(error)(scope, receive, send)

    async def _serve(self, exchange: _Exchange, receive: Receive, send: Send) -> None:
        path = _path(exchange.scope)
        if exchange.headers.get(CLUSTER_HEADER, self._cluster_id) != self._cluster_id:
            raise RequestRefused(421, "Another PengServe cluster answers at this address than the one that is meant.")
        self._authenticate(path, exchange)
        scope = _with_own_headers(exchange)
        if exchange.scope["method"] != "POST" or path not in GENERATION_PATHS | TOKEN_PATHS:
            await self._app(scope, bounded(receive, self._config.limits.max_body_bytes), send)
            return
        arrived_s = monotonic()
        timeout_s = self._config.limits.request_timeout_s
        deadline_s = asyncio.get_running_loop().time() + timeout_s if timeout_s else None
        is_generation = path in GENERATION_PATHS
        if is_generation:
            self._traffic.require_room(1)
        max_body_bytes = self._config.limits.max_body_bytes
        most = max_body_bytes if is_generation else min(max_body_bytes, MAX_TOKEN_BODY_BYTES)
        body = await self._bodies.read(exchange.headers, receive, most)
        data = parse_object(body, self._max_model_len())
        replayed = replay(body, receive)
        if not is_generation:
            check_common(data)
            with self._tokenizing.take(1):
                async with self._long_text if len(body) > LONG_TEXT_BYTES else nullcontext():
                    await self._app(scope, replayed, send)
            return
        num_sequences = check_generation(data, self._config.limits, self._vocab_size)
        named = key_id(bearer(exchange.headers)) if self._keys.api else ""
        options = read_options(exchange.headers, data, self._config.degrees, self._contracts, named)
        if self._config.otlp_endpoint:
            options = replace(options, traceparent=exchange.headers.get("traceparent", "")[:MAX_TRACEPARENT_CHARS])
        if (for_vllm := without_own_fields(data)) is not None:
            replayed = replay(json.dumps(for_vllm).encode(), receive)
        slo = options.contract.slo
        kept = KeptAnswer(slo, arrived_s) if slo is not None else None
        with (
            self._tenants.place(options.contract.tenant, num_sequences),
            self._traffic.ticket(num_sequences) as ticket,
            ending_with_block(self._abort) as begun,
            ExitStack() as context,
        ):
            set_for_request: tuple[tuple[ContextVar[Any], Any], ...] = (
                (current_ticket, ticket),
                (current_options, options),
                (current_deadline_s, deadline_s),
                (current_kept, kept),
                (current_begun, begun),
            )
            for variable, value in set_for_request:
                context.callback(variable.reset, variable.set(value))
            await self._app(scope, replayed, send)

    def _noting(self, exchange: _Exchange, send: Send) -> Send:
        """`send` that puts the request id on the answer and notes that it has begun."""
        is_echoed = self._config.is_id_echoed and exchange.headers.get(request_ids.HEADER) == exchange.request_id

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.started = True
                message.setdefault("headers", [])
                if not is_echoed:
                    MutableHeaders(scope=message)["x-request-id"] = exchange.request_id
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                exchange.finished = True
            await send(message)

        return noting

    def _authenticate(self, path: str, exchange: _Exchange) -> None:
        if path.startswith(ADMIN_PREFIX):
            self._admin.require(exchange.scope["method"], exchange.headers)
            return
        key = bearer(exchange.headers)
        if path == METRICS_PATH and self._keys.metrics and not self._keys.metrics.accept(key):
            raise RequestRefused(401, "The metrics key or the admin key is needed: send it as `Authorization: Bearer`.")
        is_guarded = path.startswith("/v1") or path in TOKEN_PATHS
        if is_guarded and self._keys.api and not self._keys.api.accept(key):
            raise RequestRefused(401, "An API key is needed: send it as `Authorization: Bearer KEY`.")


_REASONS = {401: "auth", 403: "auth", 413: "body_size"}


def _path(scope: Scope) -> str:
    root = scope.get("root_path", "")
    path: str = scope["path"]
    return path.removeprefix(root) if root else path


def _without_trailing_slash(scope: Scope) -> Scope:
    """`/v1/models/` is `/v1/models`: no route ends in a slash, and some clients put one there."""
    path, raw_path = scope["path"], scope.get("raw_path") or b""
    if not path.endswith("/") or _path(scope) == "/":
        return scope
    return {**scope, "path": path[:-1], "raw_path": raw_path.removesuffix(b"/")}


def _with_own_headers(exchange: _Exchange) -> Scope:
    kept = [(name, value) for name, value in exchange.scope["headers"] if name.lower() not in _DROPPED_HEADERS]
    return {**exchange.scope, "headers": [*kept, (b"x-request-id", exchange.request_id.encode())]}
