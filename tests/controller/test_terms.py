"""Terms: which of several controllers counts, without any clock."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from pengserve.cluster.ingress.routing.routes import RouteWatcher
from pengserve.controller.events import EventLog
from pengserve.controller.loop import Controller
from pengserve.controller.terms import LocalTermStore, Term
from pengserve.planners.types.errors import FenceError, SupersededError
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.ids import NO_VERSION, InstanceKey, Version
from pengserve.planners.types.snapshot import InstanceSnapshot, RoutingTable
from pengserve.replicas.terms import TermFence
from tests.controller.fakes import FakePort, life
from tests.controller.test_loop import CONFIG, routed, routes, running, until


class FencedPort:
    """One controller's way to a shared cluster, whose instances heed terms as real ones do."""

    def __init__(self, cluster: FakePort, fences: dict[InstanceKey, TermFence]) -> None:
        self.term = Term(cluster.terms)
        self.orders: list[tuple[str, InstanceKey]] = []
        self._cluster, self._fences = cluster, fences

    async def status(self, key: InstanceKey) -> InstanceSnapshot:
        said = await self._cluster.status(key)
        fence = self._fences.setdefault(key, TermFence())
        fence.hear(self.term.number)
        return replace(said, term=fence.newest)

    def statuses(self, keys):  # type: ignore[no-untyped-def]
        return [self.status(key) for key in keys]

    async def create(self, key: InstanceKey) -> None:
        self.orders.append(("create", key))
        await self._cluster.create(key)

    async def kill(self, key: InstanceKey) -> None:
        self.orders.append(("kill", key))
        await self._cluster.kill(key)

    def __getattr__(self, name: str) -> Callable:
        return getattr(self._cluster, name)


class Clocked:
    """A wall clock that a test sets."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


async def first_table(port: FakePort, wall_clock: Callable[[], float]) -> RoutingTable:
    """What the next controller of the cluster shows when both instances are routed. It keeps no log."""
    controller = Controller(CONFIG, port, EventLog(wall_clock=wall_clock), Term(port.terms), wall_clock=wall_clock)
    loop = asyncio.create_task(controller.run())
    try:
        return await routed(controller, lambda table: len(table.routes) == 2)
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await controller._supervision.calls.close()


async def test_a_wall_clock_set_back_between_two_controllers_freezes_no_route() -> None:
    port, clock = FakePort(), Clocked(1_800_000_000.0)
    before = await first_table(port, clock)
    clock.now_s -= 86_400.0
    after = await first_table(port, clock)
    assert after.version > before.version and after.epoch > before.epoch


async def test_an_ingress_takes_growth_alone() -> None:
    """Of two controllers that it hears alternately, the table of the older one is never taken up again."""
    versions = [Version(term=1, counter=9), Version(term=2, counter=1), Version(term=1, counter=10)]
    tables = [RoutingTable(version=version, epoch=1, routes=()) for version in versions]
    taken, over = [], asyncio.Event()

    class Source:
        async def routing(self, known_version: Version, timeout_s: float) -> RoutingTable:
            if not tables:
                over.set()
                await asyncio.Event().wait()
            return tables.pop(0)

    watcher = RouteWatcher(Source(), lambda table: taken.append(table.version))
    watching = asyncio.create_task(watcher.run())
    await over.wait()
    watching.cancel()
    assert taken == versions[:2] and watcher.table.version == versions[1]


async def test_the_older_of_two_controllers_stops_and_says_so_once() -> None:
    cluster, fences = FakePort(), {}
    ports = FencedPort(cluster, fences), FencedPort(cluster, fences)
    old, new = (Controller(CONFIG, port, EventLog(), port.term) for port in ports)
    running_old = asyncio.create_task(old.run())
    before = await routed(old, routes(life(0), life(1)))
    waiting = asyncio.create_task(old.routing(before.version, 30))
    running_new = asyncio.create_task(new.run())
    after = await routed(new, routes(life(0), life(1)))
    assert after.version > before.version
    await asyncio.wait_for(running_old, 40)  # by itself: an instance told it
    stops = [event for event in old.events(limit=999) if event.kind is EventKind.CONTROLLER_STOP]
    assert [stop.why for stop in stops] == ["controller term 2 has taken over from term 1"]
    for question in (waiting, old.routing(NO_VERSION, 30)):
        with pytest.raises(SupersededError, match="has taken over"):
            await question
    orders = list(ports[0].orders)
    cluster.crash(life(0))
    await routed(new, routes(life(0, 2), life(1)))
    assert ports[0].orders == orders, "the older one creates and kills nothing any more"
    running_new.cancel()
    await asyncio.gather(running_new, return_exceptions=True)
    await new._supervision.calls.close()


async def test_a_controller_looks_for_its_successor_before_it_creates_or_kills() -> None:
    """Also where no instance is left that could tell it."""
    port = FakePort()
    async with running(port) as controller:
        await routed(controller, routes(life(0), life(1)))
        await port.terms.claim(0)
        port.instances.clear()
        created = list(port.created)
        await until(lambda: any(e.kind is EventKind.CONTROLLER_STOP for e in controller.events(limit=999)))
        assert port.created == created


async def test_a_term_is_above_what_instances_remember_where_the_store_has_lost_it() -> None:
    cluster, fences = FakePort(), {life(0): TermFence()}
    fences[life(0)].hear(7)
    await cluster.create(life(0))
    port = FencedPort(cluster, fences)
    controller = Controller(CONFIG, port, EventLog(), port.term)
    loop = asyncio.create_task(controller.run())
    table = await routed(controller, routes(life(0), life(1)))
    assert table.version.term == 8
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    await controller._supervision.calls.close()


def test_an_instance_refuses_orders_of_an_older_term_alone() -> None:
    fence = TermFence()
    fence.require(3)
    fence.hear(2)
    fence.require(0)
    with pytest.raises(FenceError, match="term 2, and term 3 has taken over"):
        fence.require(2)
    fence.require(3)
    fence.require(4)
    assert fence.newest == 4


async def test_no_two_claims_get_the_same_term() -> None:
    store = LocalTermStore()
    assert [await store.claim(0), await store.claim(5), await store.claim(2)] == [1, 6, 7]
    assert await store.newest() == 7
