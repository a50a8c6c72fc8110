"""The blocking and the async client."""

import asyncio
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from pengserve.client import protocol
from pengserve.client.protocol import DEFAULT_URL, Call, Endpoint, Pause, Program, Readiness
from pengserve.client.slo import Slo, async_openai_client, openai_client
from pengserve.planners.types.drains import DrainOperation
from pengserve.planners.types.errors import PengServeError
from pengserve.planners.types.events import Event
from pengserve.planners.types.snapshot import ClusterSnapshot, LayoutView, RoutingTable
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.planners.types.tenants import TenantUse

if TYPE_CHECKING:
    import openai

T = TypeVar("T")

_OPENAI_MISSING = "the openai package is not installed: run `pip install 'pengserve[openai]'`"


class PengServe:
    """A blocking client of one PengServe application. Safe to share between threads.

        with PengServe(admin_key="...") as client:
            client.wait_ready(timeout_s=120)
            print(client.status().layout)
            client.openai().chat.completions.create(model=client.models()[0], messages=[...])

    Every call raises `PengServeAPIError` where the server refuses and `PengServeConnectionError` where none answers.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout_s: float = 10.0,
        verify: bool | str = True,
        cluster_id: str | None = None,
    ) -> None:
        """`api_key` opens the OpenAI routes, `admin_key` the cluster routes; `timeout_s` bounds each wait for bytes.

        `verify` is how a TLS certificate is checked: against the system's authorities, those in a file, or not at all.
        Where `cluster_id` is given, another cluster that answers at this address refuses every call (HTTP 421).
        """
        self._endpoint = Endpoint.at(base_url, api_key, admin_key, timeout_s, cluster_id)
        self._http = httpx.Client(**self._endpoint.client_options(verify))

    def status(self) -> ClusterSnapshot:
        """All that the controller knows of the cluster now."""
        return self._call(protocol.status())

    def tenants(self) -> tuple[TenantUse, ...]:
        """What tenants and classes have and were served at the ingress that answers, the most served first."""
        return self._call(protocol.tenants())

    def events(self, after: int = 0, limit: int = 100) -> tuple[Event, ...]:
        """Events with a sequence number above `after`, oldest first, at most `limit`."""
        return self._call(protocol.events(after, limit))

    def routing(self) -> RoutingTable:
        """Where requests go now."""
        return self._call(protocol.routing())

    def live(self) -> bool:
        """Whether a server answers at all. False where none does."""
        try:
            return self._call(protocol.live())
        except PengServeError:
            return False

    def readiness(self) -> Readiness:
        """Whether new requests are taken, and what is missing if not."""
        return self._call(protocol.readiness())

    def ready(self) -> bool:
        """Whether new requests are taken."""
        return self.readiness().ready

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Return once new requests are taken. Raises `PengServeTimeoutError` after `timeout_s`."""
        self._run(protocol.wait_ready(timeout_s, time.monotonic))

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Take no new requests and let the running ones finish; True when all did within `timeout_s`."""
        return self._call(protocol.drain(timeout_s))

    def drain_instance(self, instance_id: int, timeout_s: float = 60.0, *, wait: bool = True) -> DrainOperation:
        """Move the requests of one instance to others, end it, and keep its slot empty until `undrain`.

        What cannot move within `timeout_s` is sent again elsewhere. With `wait`, returns once `safe_to_delete` is true.
        """
        return self._run(protocol.wait_drained(instance_id, timeout_s, wait, time.monotonic))

    def drain_operation(self, instance_id: int) -> DrainOperation:
        """How far the drain of one instance is."""
        return self._call(protocol.drain_operation(instance_id))

    def undrain(self, instance_id: int) -> None:
        """Start an instance again in a slot that was drained."""
        self._call(protocol.undrain(instance_id))

    def layout(self) -> LayoutView:
        """How the instances are grouped now, what they could form, and whether the cluster or a user decides."""
        return self._call(protocol.layout())

    def set_layout(
        self, layout: str, strategy: str = SwitchStrategy.CARRY, *, wait: bool = True, timeout_s: float = 60.0
    ) -> LayoutView:
        """Change how the instances are grouped, and keep it so until `auto_layout`.

            client.set_layout("tp2")                  # every aligned pair, the rest alone
            client.set_layout("tp2@(0,1) dp@(2)")     # these groups; instances that are not named are alone
            client.set_layout("dp", strategy="hard")

        `strategy` says what becomes of running requests: "carry" (they go on with their KV), "hard" (they wait),
        "sequential" or "soft" (they finish first). With `wait`, returns once the layout stands, and raises
        `PengServeTimeoutError` if it does not within `timeout_s`; the cluster then goes on trying.
        """
        return self._run(protocol.set_layout(layout, strategy, wait, timeout_s, time.monotonic))

    def auto_layout(self) -> LayoutView:
        """Let the cluster choose its layout from the load again."""
        return self._call(protocol.put_layout("auto"))

    def models(self) -> tuple[str, ...]:
        """Names that requests may put into `model`."""
        return self._call(protocol.models())

    def openai(self, *, slo: Slo | None = None, **options: Any) -> "openai.OpenAI":
        """An `openai.OpenAI` for this server; `options` go to its constructor.

        Its requests for text bring `slo`, unless one has its own: `extra_body={"slo": {...}}`. `kept_of(answer)` tells
        what was kept of it.
        """
        try:
            return openai_client(self._endpoint.openai_options(options), slo)
        except ImportError:
            raise PengServeError(_OPENAI_MISSING) from None

    def close(self) -> None:
        """Close the connections. The client cannot be used afterwards."""
        self._http.close()

    def __enter__(self) -> "PengServe":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, call: Call[T]) -> T:
        try:
            response = self._http.send(self._endpoint.request(call))
        except httpx.HTTPError as error:
            raise self._endpoint.failure(error) from error
        return self._endpoint.answer(call, response)

    def _run(self, program: Program[T]) -> T:
        try:
            wanted = next(program)
            while True:
                if isinstance(wanted, Pause):
                    time.sleep(wanted.seconds)
                    wanted = program.send(None)
                    continue
                try:
                    answer = self._call(wanted)
                except PengServeError as error:
                    wanted = program.throw(error)
                else:
                    wanted = program.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result


class AsyncPengServe:
    """`PengServe` for asyncio: the same calls, awaited.

    async with AsyncPengServe() as client:
        await client.wait_ready()
        print(await client.status())
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout_s: float = 10.0,
        verify: bool | str = True,
        cluster_id: str | None = None,
    ) -> None:
        """`api_key` opens the OpenAI routes, `admin_key` the cluster routes; `timeout_s` bounds each wait for bytes.

        `verify` is how a TLS certificate is checked: against the system's authorities, those in a file, or not at all.
        Where `cluster_id` is given, another cluster that answers at this address refuses every call (HTTP 421).
        """
        self._endpoint = Endpoint.at(base_url, api_key, admin_key, timeout_s, cluster_id)
        self._http = httpx.AsyncClient(**self._endpoint.client_options(verify))

    async def status(self) -> ClusterSnapshot:
        """All that the controller knows of the cluster now."""
        return await self._call(protocol.status())

    async def tenants(self) -> tuple[TenantUse, ...]:
        """What tenants and classes have and were served at the ingress that answers, the most served first."""
        return await self._call(protocol.tenants())

    async def events(self, after: int = 0, limit: int = 100) -> tuple[Event, ...]:
        """Events with a sequence number above `after`, oldest first, at most `limit`."""
        return await self._call(protocol.events(after, limit))

    async def routing(self) -> RoutingTable:
        """Where requests go now."""
        return await self._call(protocol.routing())

    async def live(self) -> bool:
        """Whether a server answers at all. False where none does."""
        try:
            return await self._call(protocol.live())
        except PengServeError:
            return False

    async def readiness(self) -> Readiness:
        """Whether new requests are taken, and what is missing if not."""
        return await self._call(protocol.readiness())

    async def ready(self) -> bool:
        """Whether new requests are taken."""
        return (await self.readiness()).ready

    async def wait_ready(self, timeout_s: float = 600.0) -> None:
        """Return once new requests are taken. Raises `PengServeTimeoutError` after `timeout_s`."""
        await self._run(protocol.wait_ready(timeout_s, time.monotonic))

    async def drain(self, timeout_s: float = 60.0) -> bool:
        """Take no new requests and let the running ones finish; True when all did within `timeout_s`."""
        return await self._call(protocol.drain(timeout_s))

    async def drain_instance(self, instance_id: int, timeout_s: float = 60.0, *, wait: bool = True) -> DrainOperation:
        """Move the requests of one instance to others, end it, and keep its slot empty until `undrain`.

        What cannot move within `timeout_s` is sent again elsewhere. With `wait`, returns once `safe_to_delete` is true.
        """
        return await self._run(protocol.wait_drained(instance_id, timeout_s, wait, time.monotonic))

    async def drain_operation(self, instance_id: int) -> DrainOperation:
        """How far the drain of one instance is."""
        return await self._call(protocol.drain_operation(instance_id))

    async def undrain(self, instance_id: int) -> None:
        """Start an instance again in a slot that was drained."""
        await self._call(protocol.undrain(instance_id))

    async def layout(self) -> LayoutView:
        """How the instances are grouped now, what they could form, and whether the cluster or a user decides."""
        return await self._call(protocol.layout())

    async def set_layout(
        self, layout: str, strategy: str = SwitchStrategy.CARRY, *, wait: bool = True, timeout_s: float = 60.0
    ) -> LayoutView:
        """Change how the instances are grouped, and keep it so until `auto_layout`.

        `layout` is text such as "tp2", "dp" or "tp2@(0,1) dp@(2)". `strategy` says what becomes of running requests:
        "carry", "hard", "sequential" or "soft". With `wait`, returns once the layout stands, and raises
        `PengServeTimeoutError` if it does not within `timeout_s`; the cluster then goes on trying.
        """
        return await self._run(protocol.set_layout(layout, strategy, wait, timeout_s, time.monotonic))

    async def auto_layout(self) -> LayoutView:
        """Let the cluster choose its layout from the load again."""
        return await self._call(protocol.put_layout("auto"))

    async def models(self) -> tuple[str, ...]:
        """Names that requests may put into `model`."""
        return await self._call(protocol.models())

    def openai(self, *, slo: Slo | None = None, **options: Any) -> "openai.AsyncOpenAI":
        """An `openai.AsyncOpenAI` for this server; `options` go to its constructor.

        Its requests for text bring `slo`, unless one has its own: `extra_body={"slo": {...}}`. `kept_of(answer)` tells
        what was kept of it.
        """
        try:
            return async_openai_client(self._endpoint.openai_options(options), slo)
        except ImportError:
            raise PengServeError(_OPENAI_MISSING) from None

    async def close(self) -> None:
        """Close the connections. The client cannot be used afterwards."""
        await self._http.aclose()

    async def __aenter__(self) -> "AsyncPengServe":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, call: Call[T]) -> T:
        try:
            response = await self._http.send(self._endpoint.request(call))
        except httpx.HTTPError as error:
            raise self._endpoint.failure(error) from error
        return self._endpoint.answer(call, response)

    async def _run(self, program: Program[T]) -> T:
        try:
            wanted = next(program)
            while True:
                if isinstance(wanted, Pause):
                    await asyncio.sleep(wanted.seconds)
                    wanted = program.send(None)
                    continue
                try:
                    answer = await self._call(wanted)
                except PengServeError as error:
                    wanted = program.throw(error)
                else:
                    wanted = program.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
