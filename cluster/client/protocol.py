"""Every call of the SDK as a value, without I/O: what to send, and how to read the answer.

`PengServe` and `AsyncPengServe` are thin drivers over this module. A single request is a `Call`; something that takes
several requests and pauses (`wait_ready`) is a `Program`, a generator that yields what it wants done and is sent the
results, so that the blocking and the async client run the very same lines.
"""

import ssl
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import httpx

from pengserve.client.errors import PengServeAPIError, PengServeConnectionError, PengServeTimeoutError
from pengserve.planners.types.cluster_id import CLUSTER_HEADER
from pengserve.planners.types.codec import from_data
from pengserve.planners.types.drains import DrainOperation
from pengserve.planners.types.errors import PengServeError
from pengserve.planners.types.events import Event
from pengserve.planners.types.snapshot import ClusterSnapshot, LayoutView, RoutingTable
from pengserve.planners.types.tenants import TenantUse

DEFAULT_URL = "http://127.0.0.1:8000"
# Servers close a connection that is idle for 5 s, as httpx would: one that is used again just then is reset.
LIMITS = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=2.0)
DRAIN_MARGIN_S = 15.0  # the server answers a drain when it is over: the client must outwait it

DRAIN_END_S = 60.0  # in which the process of a drained instance ends
DRAIN_PERIOD_S = 0.25

LAYOUT_PERIOD_S = 0.05  # a switch takes some ten milliseconds

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether new requests are taken, and what is missing if not."""

    ready: bool
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One HTTP request and the reading of its answer."""

    path: str
    parse: Callable[[Any], T]
    method: str = "GET"
    params: Mapping[str, int] = field(default_factory=dict)
    json: Mapping[str, Any] | None = None
    is_admin: bool = False  # goes out with the admin key
    accepts: tuple[int, ...] = (200,)
    timeout_s: float | None = None  # None: the client's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Wait for so long."""

    seconds: float


Program = Generator[Call[Any] | Pause, Any, T]


def status() -> Call[ClusterSnapshot]:
    """The cluster's snapshot."""
    return Call(path="/cluster/status", is_admin=True, parse=lambda data: from_data(ClusterSnapshot, data))


def tenants() -> Call[tuple[TenantUse, ...]]:
    """What tenants and classes have and were served at the ingress that answers."""
    return Call(
        path="/cluster/tenants",
        is_admin=True,
        parse=lambda data: tuple(from_data(TenantUse, item) for item in data["tenants"]),
    )


def events(after: int, limit: int) -> Call[tuple[Event, ...]]:
    """Events with a sequence number above `after`, oldest first, at most `limit`."""
    return Call(
        path="/cluster/events",
        is_admin=True,
        params={"after": after, "limit": limit},
        parse=lambda data: tuple(from_data(Event, item) for item in data["events"]),
    )


def routing() -> Call[RoutingTable]:
    """The routing table in force."""
    return Call(path="/cluster/routing", is_admin=True, parse=lambda data: from_data(RoutingTable, data))


def drain(timeout_s: float) -> Call[bool]:
    """Stop taking requests and let the running ones finish; True when all did within `timeout_s`."""
    return Call(
        method="POST",
        path="/cluster/drain",
        is_admin=True,
        json={"timeout_s": timeout_s},
        parse=lambda data: bool(data["drained"]),
        timeout_s=timeout_s + DRAIN_MARGIN_S,
    )


def drain_instance(instance_id: int, timeout_s: float) -> Call[DrainOperation]:
    """Empties one instance; the answer is the operation as it is then."""
    return Call(
        method="POST",
        path=f"/cluster/instances/{instance_id}/drain",
        is_admin=True,
        json={"timeout_s": timeout_s},
        parse=_parse_drain,
    )


def drain_operation(instance_id: int) -> Call[DrainOperation]:
    """The drain of one instance as it is now."""
    return Call(path=f"/cluster/instances/{instance_id}/drain", is_admin=True, parse=_parse_drain)


def undrain(instance_id: int) -> Call[None]:
    """Fills a drained slot again."""
    return Call(
        method="POST", path=f"/cluster/instances/{instance_id}/undrain", is_admin=True, json={}, parse=lambda data: None
    )


def wait_drained(instance_id: int, timeout_s: float, wait: bool, now: Callable[[], float]) -> Program[DrainOperation]:
    """Empties one instance, and with `wait` looks until nothing of it is left.

    Raises:
        PengServeAPIError: it was refused.
        PengServeTimeoutError: the drain takes much longer than `timeout_s`; it goes on.
    """
    deadline_s = now() + timeout_s + DRAIN_MARGIN_S + DRAIN_END_S
    operation = yield drain_instance(instance_id, timeout_s)
    while wait and not operation.safe_to_delete:
        if now() > deadline_s:
            raise PengServeTimeoutError(
                f"instance {operation.key} still drains: {operation.num_left} requests are left"
            )
        yield Pause(seconds=DRAIN_PERIOD_S)
        try:
            operation = yield drain_operation(instance_id)
        except PengServeConnectionError:
            continue  # the time-out decides
    return operation


def layout() -> Call[LayoutView]:
    """The layout that the cluster has, and whether the cluster or a user decides about it."""
    return Call(path="/cluster/layout", is_admin=True, parse=_parse_layout)


def put_layout(text: str, strategy: str | None = None) -> Call[LayoutView]:
    """Asks for a layout; the answer is the layout as it is then."""
    body = {"layout": text} if strategy is None else {"layout": text, "strategy": str(strategy)}
    return Call(method="PUT", path="/cluster/layout", is_admin=True, json=body, parse=_parse_layout)


def set_layout(text: str, strategy: str, wait: bool, timeout_s: float, now: Callable[[], float]) -> Program[LayoutView]:
    """Asks for a layout, and with `wait` looks until it stands.

    Raises:
        PengServeAPIError: it was refused; nothing changes.
        PengServeTimeoutError: it does not stand within `timeout_s`, and the cluster goes on trying; or another request
            has replaced it.
    """
    deadline_s = now() + timeout_s
    view = yield put_layout(text, strategy)
    wanted = set(view.policy.target)
    while wait and not view.policy.is_auto and set(view.layout.groups) != wanted:
        left_s = deadline_s - now()
        if left_s <= 0:
            raise PengServeTimeoutError(f"the layout is not {text} after {timeout_s:g} s{_why_late(view)}")
        yield Pause(seconds=min(LAYOUT_PERIOD_S, left_s))
        try:
            view = yield layout()
        except PengServeConnectionError:
            continue  # the time-out decides
        if set(view.policy.target) != wanted:
            raise PengServeTimeoutError(f"another request has replaced the layout {text} before it was reached")
    return view


def live() -> Call[bool]:
    """Whether the ingress process answers at all."""
    return Call(path="/live", accepts=(200, 503), parse=lambda data: True)


def readiness() -> Call[Readiness]:
    """Whether new requests are taken. 503 is the answer "no", not a failure."""
    return Call(path="/ready", accepts=(200, 503), parse=_parse_readiness)


def models() -> Call[tuple[str, ...]]:
    """Names that requests may put into `model`."""
    return Call(path="/v1/models", parse=lambda data: tuple(str(item["id"]) for item in data["data"]))


def wait_ready(timeout_s: float, now: Callable[[], float]) -> Program[None]:
    """Ask for readiness until the answer is yes.

    Raises:
        PengServeTimeoutError: not within `timeout_s`; says what was missing last.
    """
    deadline_s = now() + timeout_s
    pause_s = 0.05
    while True:
        try:
            answer = yield readiness()
            if answer.ready:
                return
            why = answer.why or "the server is not ready"
        except PengServeError as error:
            why = str(error)
        left_s = deadline_s - now()
        if left_s <= 0:
            raise PengServeTimeoutError(f"not ready after {timeout_s:g} s: {why}")
        yield Pause(seconds=min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One server's address and keys: turns calls into requests, and answers and failures into values and errors."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    timeout_s: float = 10.0
    cluster_id: str | None = None  # another cluster refuses requests that name this one

    @classmethod
    def at(
        cls, base_url: str, api_key: str | None, admin_key: str | None, timeout_s: float, cluster_id: str | None = None
    ) -> "Endpoint":
        """An endpoint for `base_url`, with or without a slash or `/v1` at its end.

        Raises:
            PengServeError: not an http(s) address.
        """
        url = base_url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PengServeError(f"{base_url!r} is not an address: write it like {DEFAULT_URL}")
        return cls(url=url, api_key=api_key, admin_key=admin_key, timeout_s=timeout_s, cluster_id=cluster_id)

    def client_options(self, verify: bool | str) -> dict[str, Any]:
        """Arguments of `httpx.Client` and `httpx.AsyncClient`."""
        # A proxy configured for the way out must not stand between a client and its own machine.
        is_loopback = urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")
        check = ssl.create_default_context(cafile=verify) if isinstance(verify, str) else verify
        return {"timeout": self.timeout_s, "trust_env": not is_loopback, "verify": check, "limits": LIMITS}

    def request(self, call: Call[Any]) -> httpx.Request:
        """The request to send."""
        key = (self.admin_key or self.api_key) if call.is_admin else self.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if self.cluster_id:
            headers[CLUSTER_HEADER] = self.cluster_id
        timeout = httpx.Timeout(call.timeout_s if call.timeout_s is not None else self.timeout_s)
        return httpx.Request(
            call.method,
            self.url + call.path,
            params=dict(call.params) or None,
            json=call.json,
            headers=headers,
            extensions={"timeout": timeout.as_dict()},
        )

    def answer(self, call: Call[T], response: httpx.Response) -> T:
        """The value in a complete response.

        Raises:
            PengServeAPIError: the server refused, or answered something else than PengServe would.
        """
        request_id = response.headers.get("x-request-id", "")
        try:
            data = response.json()
        except ValueError:
            data = None
        if response.status_code not in call.accepts:
            raise PengServeAPIError(response.status_code, self._refusal(call, response.status_code, data), request_id)
        try:
            return call.parse(data)
        except (ValueError, KeyError, TypeError) as error:
            message = (
                f"{self.url}{call.path} answered something unexpected ({error}): is it a PengServe of this version?"
            )
            raise PengServeAPIError(response.status_code, message, request_id) from error

    def failure(self, error: httpx.HTTPError) -> PengServeConnectionError:
        """The error to raise when no complete response came."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            why = f"cannot connect to {self.url}: is `pengserve up` running there?"
        elif isinstance(error, httpx.TimeoutException):
            why = f"{self.url} did not answer in time"
        else:
            why = f"the connection to {self.url} broke ({type(error).__name__})"
        return PengServeConnectionError(why)

    def openai_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `openai.OpenAI` and `openai.AsyncOpenAI`: ours under what the caller gave."""
        # The openai package insists on a key; an open server does not look at it.
        return {"base_url": f"{self.url}/v1", "api_key": self.api_key or "none", **given}

    def _refusal(self, call: Call[Any], status_code: int, data: Any) -> str:
        if status_code == 401:
            kind = "admin key" if call.is_admin else "API key"
            return f"{self.url}{call.path} wants an {kind}: the one given is missing or wrong"
        if status_code == 404 and call.is_admin:
            return f"there is a server at {self.url}, but no PengServe cluster answers at {call.path}"
        if status_code == 421:
            return f"{self.url} belongs to another PengServe cluster: each needs an address of its own"
        error = data.get("error") if isinstance(data, dict) else None
        if isinstance(error, dict) and isinstance(error.get("message"), str):
            return error["message"]
        return f"{call.method} {self.url}{call.path} failed"


def _parse_drain(data: Any) -> DrainOperation:
    return from_data(DrainOperation, data)


def _parse_layout(data: Any) -> LayoutView:
    return from_data(LayoutView, data)


def _why_late(view: LayoutView) -> str:
    last = view.last_switch
    if last is None:
        return ": no switch has begun; its members may still be starting"
    if last.failure:
        return f": {last.what} failed, and is tried again: {last.failure}"
    return f": {last.what} is in phase {last.phase}"


def _parse_readiness(data: Any) -> Readiness:
    # A proxy in front answers 503 in its own words while no ingress is up.
    if not isinstance(data, dict) or "ready" not in data:
        return Readiness(ready=False, why="the ingress has not started")
    return Readiness(ready=bool(data["ready"]), why=str(data.get("why") or ""))
