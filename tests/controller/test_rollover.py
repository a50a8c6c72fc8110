"""Laws of a redeploy with another configuration: old instances get no route, are not adopted, and end in their time."""

from dataclasses import replace

import pytest

from pengserve.controller import rollover
from pengserve.controller.events import EventLog
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.ids import InstanceKey
from tests.controller.fakes import FakePort, life
from tests.controller.test_loop import CONFIG, routed, running, until


async def deployed(port: FakePort) -> set[InstanceKey]:
    """Instances that a controller of the earlier configuration leaves behind."""
    async with running(port) as controller:
        await routed(controller, lambda table: len(table.routes) == 2)
    return set(port.instances)


async def test_old_instances_are_retired_and_new_ones_start_beside_them() -> None:
    port, log = FakePort(), EventLog()
    old = await deployed(port)
    port.outgoing = set(old)
    for key in old:
        port.instances[key].stays_busy = True
    async with running(port, log=log) as controller:
        table = await routed(controller, lambda table: len(table.routes) == 2)
        assert {route.key for route in table.routes} == {life(0, 2), life(1, 2)}, "keys are never given twice"
        assert old <= set(port.instances), "they finish what their ingresses have"
    kinds = [event.kind for event in log.tail(limit=100)]
    assert kinds.count(EventKind.INSTANCE_DRAIN_START) == 2
    assert EventKind.INSTANCE_ADOPTED not in kinds and EventKind.INSTANCE_DRAIN_END not in kinds


async def test_they_end_once_their_ingresses_have_left() -> None:
    port, log = FakePort(), EventLog()
    port.outgoing = await deployed(port)
    async with running(port, log=log) as controller:
        await routed(controller, lambda table: len(table.routes) == 2)
        await until(lambda: not port.outgoing & set(port.instances))
        assert not port.outgoing & port.reserved, "their room is free"
    ends = [event.span for event in log.tail(limit=100) if event.kind is EventKind.INSTANCE_DRAIN_END]
    assert sorted(ends) == ["instance:0.1", "instance:1.1"]


async def test_they_end_at_the_deadline_whatever_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollover, "HANDOVER_S", 0.1)
    port, log = FakePort(), EventLog()
    port.outgoing = await deployed(port)
    for key in port.outgoing:
        port.instances[key].stays_busy = True
    async with running(port, replace(CONFIG, drain_timeout_s=0.1), log) as controller:
        await routed(controller, lambda table: len(table.routes) == 2)
        await until(lambda: not port.outgoing & set(port.instances))
    errors = [e.why for e in log.tail(limit=100) if e.kind is EventKind.INSTANCE_DRAIN_ERROR]
    assert errors == ["requests still ran"] * 2


async def test_one_that_dies_meanwhile_frees_its_room() -> None:
    port = FakePort()
    port.outgoing = await deployed(port)
    for key in port.outgoing:
        port.instances[key].stays_busy = True
    async with running(port) as controller:
        await routed(controller, lambda table: len(table.routes) == 2)
        port.crash(life(0, 1))
        port.outgoing.discard(life(0, 1))
    async with running(port) as controller:
        await until(lambda: life(0, 1) not in port.reserved)
        assert len((await routed(controller, lambda table: len(table.routes) == 2)).routes) == 2


async def test_a_drain_of_the_application_waits_for_them_within_its_time() -> None:
    port = FakePort()
    port.outgoing = await deployed(port)
    for key in port.outgoing:
        port.instances[key].stays_busy = True
    async with running(port) as controller:
        await routed(controller, lambda table: len(table.routes) == 2)
        assert not await controller.drain(0.2), "requests still ran"
        assert not port.instances and not port.reserved
