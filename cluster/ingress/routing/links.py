"""One channel to each instance of the routing table: opened, read, given up and opened again.

New requests go to routes alone, but a switch may carry a request to any instance, so there is a link to every one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from pengserve.planners.types.errors import EngineError, LinkLostError
from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.snapshot import RoutingTable
from pengserve.replicas.engine.link import InstanceLink, Moved, Paused, StepBatch, Trial

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
SWEEP_S = 1.0
REPORT_TIMEOUT_S = 5.0


class Connect(Protocol):
    """Opens the channel to an instance, as `InstanceLink.connect` does."""

    async def __call__(
        self, endpoint: str, *, token: str, client_id: str, fingerprint: str, timeout_s: float
    ) -> InstanceLink:
        """Raises LinkLostError where no instance answers at `endpoint` in time."""


class LinkHandler(Protocol):
    """Who uses the links. All methods are called in the event loop and, but for `on_batch`, must not wait."""

    def on_up(self, link: InstanceLink) -> None:
        """`link` is open and takes requests."""

    async def on_batch(self, link: InstanceLink, batch: StepBatch) -> None:
        """The next batch of `link`; batches of one link come one after the other."""

    def on_moved(self, link: InstanceLink, moved: Moved) -> None:
        """Requests left `link`, after all batches before."""

    def on_trial(self, link: InstanceLink, trial: Trial) -> None:
        """A suspect on `link` is alone there from now on, or not."""

    def on_paused(self, link: InstanceLink, paused: Paused) -> None:
        """A request on `link` was parked, and goes on."""

    def on_down(self, link: InstanceLink, *, lost: bool) -> None:
        """`link` is gone: `lost` if unasked, else closed here."""

    def is_busy(self, link: InstanceLink) -> bool:
        """Whether a request still runs over `link`."""


class LinkPool:
    """Keeps the links in step with the routing table.

    An instance that left the table (it drains) gets nothing new, and its link is closed when its last request ended.
    """

    def __init__(
        self,
        handler: LinkHandler,
        *,
        token: str,
        client_id: str,
        report_lost: Callable[[InstanceKey, str], Awaitable],
        fingerprint: str = "",
        connect: Connect = InstanceLink.connect,
    ) -> None:
        """Connects to instances that know `token` and are of the configuration that `fingerprint` names."""
        self._handler, self._token, self._client_id, self._fingerprint = handler, token, client_id, fingerprint
        self._report_lost, self._connect = report_lost, connect
        self._routes: frozenset[InstanceKey] = frozenset()
        self._endpoints: dict[InstanceKey, str] = {}
        self._links: dict[InstanceKey, InstanceLink] = {}
        self._closing: set[InstanceKey] = set()
        self._keepers: dict[InstanceKey, asyncio.Task[None]] = {}
        self._reports: set[asyncio.Task[None]] = set()

    def apply(self, table: RoutingTable) -> None:
        """Takes a newer table into use. Returns at once; new links open in the background."""
        self._routes = frozenset(route.key for route in table.routes)
        self._endpoints = {address.key: address.endpoint for address in table.addresses}
        self._endpoints |= {route.key: route.endpoint for route in table.routes}
        for key in self._endpoints:
            if key not in self._keepers:
                self._keepers[key] = asyncio.create_task(self._keep(key), name=f"link-{key}")

    def ready(self) -> list[InstanceLink]:
        """Open links that take new requests."""
        return [link for key, link in self._links.items() if key in self._routes]

    def find(self, key: InstanceKey) -> InstanceLink | None:
        """The open link to that life of an instance, whether or not it takes new requests."""
        return self._links.get(key)

    def is_leaving(self, key: InstanceKey) -> bool:
        """Whether the table does not name that life any more: it is being drained, or was replaced."""
        return key not in self._endpoints

    def discard(self, link: InstanceLink) -> None:
        """A send over `link` failed: it gets nothing more, until its reader has seen the end as well."""
        key = link.key
        if key in self._links and self._links[key] is link:
            del self._links[key]

    async def sweep(self) -> None:
        """Closes links that neither a route nor a request needs any more. Runs until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for key, link in list(self._links.items()):
                if key not in self._endpoints and not self._handler.is_busy(link):
                    self._closing.add(key)
                    await link.close()

    async def close(self) -> None:
        """Closes everything; requests that still run are aborted by their instances."""
        keepers = list(self._keepers.values())
        self._routes, self._endpoints, self._closing = frozenset(), {}, set(self._links)
        for link in list(self._links.values()):
            await link.close()
        for task in (*keepers, *self._reports):
            task.cancel()
        await asyncio.gather(*keepers, *self._reports, return_exceptions=True)

    async def _keep(self, key: InstanceKey) -> None:
        """Connects as long as the instance is in the table, and reads until the link is lost."""
        pause_s = FIRST_PAUSE_S
        try:
            while key in self._endpoints:
                try:
                    why = await self._connect_and_read(key, self._endpoints[key])
                except Exception:
                    # A fault of ours must not make this ingress deaf to the instance for ever.
                    logger.exception("instance %s: its channel's events could not be used; connecting again", key)
                    why = "a fault of this ingress"
                if key in self._closing:
                    return
                if not why:
                    pause_s = FIRST_PAUSE_S
                    continue
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
        finally:
            self._closing.discard(key)
            del self._keepers[key]

    async def _connect_and_read(self, key: InstanceKey, endpoint: str) -> str:
        """Why no connection came about; an empty string when there was one and it has ended."""
        try:
            link = await self._connect(
                endpoint,
                token=self._token,
                client_id=self._client_id,
                fingerprint=self._fingerprint,
                timeout_s=CONNECT_TIMEOUT_S,
            )
            if link.key != key:
                await link.close()
                raise LinkLostError(f"{endpoint} is instance {link.key} now")
        except LinkLostError as error:
            logger.warning("instance %s: %s", key, error)
            self._report(key, str(error))
            return str(error)
        self._links[key] = link
        logger.info("instance %s: channel open", key)
        try:
            self._handler.on_up(link)
            async for event in link.events():
                if isinstance(event, Moved):
                    self._handler.on_moved(link, event)
                elif isinstance(event, Trial):
                    self._handler.on_trial(link, event)
                elif isinstance(event, Paused):
                    self._handler.on_paused(link, event)
                else:
                    await self._handler.on_batch(link, event)
        except LinkLostError as error:
            if key not in self._closing:
                logger.warning("%s", error)
                self._report(key, str(error))
        finally:
            self.discard(link)
            await link.close()
            await self._tell_down(link)
        return ""

    async def _tell_down(self, link: InstanceLink) -> None:
        """Until the handler has taken it in, requests would wait for a link that is gone; so it is told again."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                self._handler.on_down(link, lost=link.key not in self._closing)
                return
            except Exception:
                logger.exception("instance %s: its end is told again before connecting again", link.key)
                if link.key in self._closing and not self._endpoints:
                    return  # the pool is closed, and waits for this
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _report(self, key: InstanceKey, why: str) -> None:
        task = asyncio.create_task(self._send_report(key, why))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    async def _send_report(self, key: InstanceKey, why: str) -> None:
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                await self._report_lost(key, why)
        except (EngineError, TimeoutError) as error:
            logger.info("the loss of instance %s could not be reported: %s", key, error or "no answer")
