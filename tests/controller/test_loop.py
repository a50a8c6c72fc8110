"""The control loop over a cluster in memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pengserve.controller.events import EventDraft, EventLog, open_starts
from pengserve.controller.loop import Controller
from pengserve.controller.terms import Term
from pengserve.planners.types.config import ControllerConfig
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.ids import NO_VERSION, InstanceKey
from pengserve.planners.types.snapshot import STEP_GRACE_S, InstanceState, RoutingTable
from tests.controller.fakes import FakePort, answer, life

CONFIG = ControllerConfig(
    app="test",
    num_instances=2,
    tick_s=0.02,
    status_timeout_s=0.1,
    lost_after_s=0.3,
    restart_backoff_s=0.01,
    restart_backoff_max_s=0.05,
)


@asynccontextmanager
async def running(
    port: FakePort, config: ControllerConfig = CONFIG, log: EventLog | None = None
) -> AsyncIterator[Controller]:
    """A controller whose loop runs; on leaving it dies as by SIGKILL: no word to anybody."""
    controller = Controller(config, port, log or EventLog(), Term(port.terms))
    loop = asyncio.get_running_loop().create_task(controller.run())
    try:
        yield controller
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await controller._coordinator.close()
        await controller._supervision.calls.close()


async def routed(controller: Controller, wanted: Callable[[RoutingTable], bool], timeout_s: float = 40) -> RoutingTable:
    """The first table that is as `wanted`, by the same long-poll that ingresses use."""
    async with asyncio.timeout(timeout_s):
        version = NO_VERSION
        while True:
            table = await controller.routing(version, 1.0)
            if wanted(table):
                return table
            version = table.version


async def until(condition: Callable[[], bool], timeout_s: float = 40) -> None:
    """Waits for what nothing announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def routes(*keys: InstanceKey) -> Callable[[RoutingTable], bool]:
    """Whether exactly these instances take requests."""
    return lambda table: tuple(route.key for route in table.routes) == keys


def kinds(controller: Controller, span: str) -> list[EventKind]:
    """What happened to one life."""
    return [event.kind for event in controller.events(limit=1000) if event.span == span]


async def test_fills_all_slots() -> None:
    async with running(FakePort()) as controller:
        table = await routed(controller, routes(life(0), life(1)))
        assert [route.endpoint for route in table.routes] == ["127.0.0.1:20001", "127.0.0.1:21001"]
        snapshot = controller.snapshot()
        assert [i.state for i in snapshot.instances] == [InstanceState.READY] * 2
        assert snapshot.ranks == (0, 1) and snapshot.routing_version == table.version
        assert kinds(controller, "instance:0.1") == [EventKind.INSTANCE_START, EventKind.INSTANCE_READY]


async def test_a_reported_crash_leaves_the_routes_at_once_and_is_replaced() -> None:
    port = FakePort()
    config = ControllerConfig(app="test", num_instances=2, tick_s=60, restart_backoff_s=0)
    async with running(port, config) as controller:
        for key in (life(0), life(1)):  # nothing ticks by itself for a minute: news alone drives the loop
            controller.report_lost(key, "just to look")
        before = await routed(controller, lambda table: len(table.routes) == 2)
        port.crash(life(1))
        controller.report_lost(life(1), "end of file")
        without = await controller.routing(before.version, 5)
        assert routes(life(0))(without) and without.version == before.version.next


async def test_a_crash_is_seen_without_any_report() -> None:
    port = FakePort()
    async with running(port) as controller:
        await routed(controller, routes(life(0), life(1)))
        port.crash(life(0))
        await routed(controller, routes(life(0, 2), life(1)))
        assert kinds(controller, "instance:0.1")[-1] is EventKind.INSTANCE_LOST
        assert port.reserved == set(port.instances), "the dead one's resources are freed"


@pytest.mark.parametrize("at_once", [False, True])
async def test_a_silent_instance_is_killed_and_replaced(at_once: bool) -> None:
    port = FakePort()
    port.answer_at_once = at_once
    async with running(port) as controller:
        await routed(controller, routes(life(0), life(1)))
        port.instances[life(1)].silent = True
        await routed(controller, routes(life(0), life(1, 2)))
        assert life(1) not in port.instances
        assert "silent" in next(e.why for e in controller.events(limit=99) if e.kind is EventKind.INSTANCE_LOST)


@pytest.mark.parametrize("at_once", [False, True])
async def test_one_short_silence_is_forgiven(at_once: bool) -> None:
    port = FakePort()
    port.answer_at_once = at_once
    async with running(port) as controller:
        await routed(controller, routes(life(0), life(1)))
        port.instances[life(1)].silent = True
        await asyncio.sleep(CONFIG.status_timeout_s * 1.5)  # the silence itself is what is tested
        port.instances[life(1)].silent = False
        table = await controller.routing(NO_VERSION, 1)
        assert await controller.routing(table.version, CONFIG.lost_after_s * 2) == table


async def test_a_failed_engine_is_replaced_and_its_reason_shown() -> None:
    port = FakePort()
    port.starts_ready = False
    why = "ConfigError: model: /nowhere is no model directory"
    async with running(port) as controller:

        def six_failed() -> bool:
            for key in list(port.instances):
                port.fail(key, why)
            return len(port.created) >= 6

        await until(six_failed)
        assert all(instance.failure in ("", why) for instance in controller.snapshot().instances)
        assert any(instance.failure == why for instance in controller.snapshot().instances)
        errors = [e for e in controller.events(limit=1000) if e.kind is EventKind.INSTANCE_ERROR]
        assert {e.why for e in errors} == {why}


async def test_what_cannot_be_created_is_tried_again() -> None:
    port = FakePort()
    port.refusal = "no node has 8 GPUs"
    async with running(port) as controller:
        await until(lambda: bool(controller.events(after=8)))
        assert port.refusal in controller.snapshot().instances[0].failure
        port.refusal = ""
        table = await routed(controller, lambda table: len(table.routes) == 2)
        assert all(route.key.incarnation > 1 for route in table.routes)


async def test_an_instance_that_waits_for_its_place_holds_up_nobody() -> None:
    port = FakePort()
    async with running(port) as controller:
        await routed(controller, routes(life(0), life(1)))
        port.crash(life(0))
        port.starts_ready = False
        await until(lambda: life(0, 2) in port.instances)
        port.instances[life(0, 2)].silent = True
        port.crash(life(1))
        port.starts_ready = True
        await routed(controller, routes(life(1, 2)))


async def test_a_new_controller_adopts_what_runs_and_no_ingress_notices(tmp_path: Path) -> None:
    port, path = FakePort(), str(tmp_path / "events.jsonl")
    async with running(port, log=EventLog(path)) as controller:
        before = await routed(controller, routes(life(0), life(1)))
    port.crash(life(1))
    async with running(port, log=EventLog(path)) as controller:
        first = await controller.routing(before.version, 5)
        assert first.version > before.version and first.epoch > before.epoch
        assert routes(life(0))(first), "what lived goes on, from the first table on"
        await routed(controller, routes(life(0), life(1, 2)))
        assert port.created == [life(0), life(1), life(1, 2)], "nothing that lived was started again"
        assert kinds(controller, "instance:0.1")[-1] is EventKind.INSTANCE_ADOPTED
        assert open_starts(controller.events(limit=1000)) == ()


async def test_what_lives_outside_the_slots_is_killed() -> None:
    port = FakePort()
    for key in (life(0, 3), life(9, 1)):
        await port.create(key)
    port.reserved.add(life(1, 7))
    async with running(port) as controller:
        await routed(controller, routes(life(0, 3), life(1, 8)))
        assert set(port.instances) == port.reserved == {life(0, 3), life(1, 8)}


async def test_drain_ends_all_and_fills_nothing_again() -> None:
    port = FakePort()
    async with running(port) as controller:
        await routed(controller, routes(life(0), life(1)))
        assert await controller.drain(timeout_s=40)
        assert not port.instances and not port.reserved
        table = await controller.routing(NO_VERSION, 1)
        assert (table.routes, table.is_draining) == ((), True)
        assert kinds(controller, "instance:0.1")[-1] is EventKind.INSTANCE_DRAIN_END
        assert await controller.drain(timeout_s=1), "again is harmless"
        assert port.created == [life(0), life(1)]


async def test_a_drain_that_does_not_finish_says_so_and_ends_all_the_same() -> None:
    port = FakePort()
    async with running(port) as controller:
        await routed(controller, routes(life(0), life(1)))
        port.instances[life(1)].stays_busy = True
        assert not await controller.drain(timeout_s=0.2)
        assert not port.instances
        assert kinds(controller, "instance:1.1")[-1] is EventKind.INSTANCE_DRAIN_ERROR


async def test_a_controller_that_cannot_look_around_keeps_trying() -> None:
    class Blind(FakePort):
        can_see = False

        async def discover(self):  # type: ignore[no-untyped-def]
            if not self.can_see:
                raise ConnectionError("the cluster's control service is away")
            return await super().discover()

    port = Blind()
    async with running(port) as controller:
        with pytest.raises(EngineError, match="recovering"):
            await controller.routing(NO_VERSION, 0.05)
        port.can_see = True
        await routed(controller, routes(life(0), life(1)))


async def test_an_instance_that_begins_to_drain_by_itself_gets_no_requests_and_is_replaced() -> None:
    port = FakePort()
    async with running(port) as controller:
        await routed(controller, routes(life(0), life(1)))
        port.instances[life(0)].said = answer(life(0), InstanceState.DRAINING)
        await routed(controller, routes(life(0, 2), life(1)))


async def test_stop_leaves_the_instances_alone() -> None:
    port = FakePort()
    async with running(port) as controller:
        await routed(controller, routes(life(0), life(1)))
        await controller.stop()
        assert set(port.instances) == {life(0), life(1)}
        assert controller.events(limit=1000)[-1].kind is EventKind.CONTROLLER_STOP


@pytest.mark.parametrize(
    "data",
    [
        {"is_auto": False, "groups": "tp2@(2,3)", "strategy": "carry"},  # of a larger cluster
        {"is_auto": False, "groups": "tp2@(0", "strategy": "carry"},
        {"is_auto": False},
        {"term": "x", "epoch": None},
    ],
)
async def test_a_log_of_another_cluster_or_a_damaged_one_keeps_no_controller_from_coming_back(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    path = str(tmp_path / "events.jsonl")
    EventLog(path).append([EventDraft(kind=EventKind.POLICY_CHANGED, data=data)])
    port = FakePort((2,))
    async with running(port, replace(CONFIG, degrees=(2,)), log=EventLog(path)) as controller:
        await routed(controller, routes(life(0), life(1)))
        port.crash(life(1))
        await routed(controller, routes(life(0), life(1, 2)))
        assert controller.snapshot().policy.is_auto


async def test_an_instance_whose_step_hangs_is_replaced_though_it_answers() -> None:
    port = FakePort()
    log = EventLog()
    async with running(port, log=log) as controller:
        await routed(controller, lambda table: len(table.routes) == 2)
        instance = port.instances[life(0)]
        stats = replace(instance.said.stats, step_limit_s=90.0, step_age_s=90.0 + STEP_GRACE_S)
        instance.said = replace(instance.said, stats=stats)
        await asyncio.sleep(5 * CONFIG.tick_s)
        assert life(0) in port.instances, "as long as its own watch may still act"
        instance.said = replace(instance.said, stats=replace(stats, step_age_s=91.0 + STEP_GRACE_S))
        await routed(controller, lambda table: life(0, 2) in {route.key for route in table.routes})
    lost = [event for event in log.tail(limit=100) if event.kind is EventKind.INSTANCE_LOST]
    assert [event.span for event in lost] == ["instance:0.1"]
    assert lost[0].why == "a step hangs for 106 s, and 90 s is the limit"
