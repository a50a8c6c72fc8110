"""Laws of the drain of one instance: its route goes at once, its requests learn where to go, its slot stays empty."""

from dataclasses import replace
from pathlib import Path

import pytest

from pengserve.controller.events import EventLog
from pengserve.controller.loop import Controller
from pengserve.planners.types.config import MigrateConfig
from pengserve.planners.types.drains import DrainPhase
from pengserve.planners.types.errors import PlanError
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.orders import Redirect
from pengserve.planners.types.snapshot import InstanceState, InstanceStats
from tests.controller.fakes import FakePort, life
from tests.controller.test_loop import CONFIG, routed, routes, running, until
from tests.controller.test_switches import CONFIG as SWITCHES
from tests.controller.test_switches import formable, layout, log, shapes, target

ELASTIC = replace(CONFIG, num_instances=3, degrees=(2,), lost_after_s=30.0)
BLOCKS = {"kv_blocks_total": 64, "block_size": 32}


def load(port: FakePort, instance_id: int, *, num_running: int, used: int, num_waiting: int = 0) -> None:
    """An instance says that it runs so much, and that requests of 100 tokens each wait there."""
    instance = port.instances[life(instance_id)]
    stats = InstanceStats(
        num_running=num_running,
        kv_blocks_used=used,
        num_waiting=num_waiting,
        queued_tokens=100 * num_waiting,
        **BLOCKS,
    )
    instance.said = replace(instance.said, stats=stats)


def is_done(controller: Controller, instance_id: int) -> bool:
    return controller.drain_operation(instance_id).phase is DrainPhase.DONE


async def test_a_drained_slot_stays_empty_until_it_is_undrained() -> None:
    port = FakePort()
    async with running(port) as controller:
        await routed(controller, routes(life(0), life(1)))
        first = await controller.drain_instance(1, 5.0)
        assert (first.id, first.key) == ("drain-1.1", life(1)) and not first.safe_to_delete
        await routed(controller, routes(life(0)))
        await until(lambda: is_done(controller, 1))
        again = await controller.drain_instance(1, 5.0)
        assert again.id == first.id and again.safe_to_delete and life(1) not in port.instances
        await controller.tick()
        assert port.created == [life(0), life(1)], "the slot was filled again"
        assert "pengserve undrain 1" in controller.snapshot().instances[1].failure
        await controller.undrain(1)
        await routed(controller, routes(life(0), life(1, 2)))
        kinds = [e.kind for e in controller.events(limit=1000) if e.span == "instance:1.1"]
        assert kinds[-3:] == [
            EventKind.INSTANCE_DRAIN_START,
            EventKind.INSTANCE_DRAIN_END,
            EventKind.INSTANCE_UNDRAINED,
        ]


async def test_requests_are_told_to_go_where_there_is_room_and_at_last_to_leave() -> None:
    port = FakePort(degrees=(2,))
    async with running(port, ELASTIC) as controller:
        await routed(controller, routes(life(0), life(1), life(2)))
        load(port, 0, num_running=1, used=60)
        load(port, 1, num_running=4, used=20)
        load(port, 2, num_running=1, used=34)
        source = port.instances[life(1)]
        source.waits_to_drain = True
        await until(lambda: controller.snapshot().instances[1].stats.num_running == 4)
        await controller.drain_instance(1, 0.5)
        await until(lambda: len(source.orders) >= 2)
        by_target = {order.target: order for order in source.orders[:2]}
        assert set(by_target) == {life(0), life(2)} and all(order.source == life(1) for order in source.orders)
        assert by_target[life(0)].max_tokens <= 4 * 32 and by_target[life(2)].max_tokens > 15 * 32
        assert all(order.empties and not order.must_leave for order in source.orders[:2])
        assert controller.drain_operation(1).num_left == 4
        await until(lambda: any(order.must_leave for order in source.orders))
        assert len({order.order_id for order in source.orders}) == len(source.orders)
        load(port, 1, num_running=0, used=0)
        source.drained.set()
        await until(lambda: is_done(controller, 1))


async def test_peers_stay_connected_to_an_instance_that_is_being_drained() -> None:
    port = FakePort(degrees=(2,))
    async with running(port, ELASTIC) as controller:
        await routed(controller, routes(life(0), life(1), life(2)))
        await until(lambda: all(i.directories for i in port.instances.values()))
        port.instances[life(1)].waits_to_drain = True
        await controller.drain_instance(1, 30.0)
        await routed(controller, routes(life(0), life(2)))
        for _ in range(5):
            await controller.tick()
        assert life(1) in {peer.key for peer in port.instances[life(0)].directories[-1].peers}


async def test_one_that_leaves_by_itself_is_told_where_its_requests_may_go_and_its_slot_is_filled_again() -> None:
    port = FakePort(degrees=(2,))
    async with running(port, ELASTIC) as controller:
        await routed(controller, routes(life(0), life(1), life(2)))
        for instance_id in range(3):
            load(port, instance_id, num_running=4, used=20)
        await until(lambda: controller.snapshot().instances[1].stats.num_running == 4)
        source = port.instances[life(1)]
        source.waits_to_drain = True
        source.said = replace(source.said, state=InstanceState.DRAINING)  # it has had a SIGTERM
        await routed(controller, routes(life(0), life(2)))
        await until(lambda: {order.target for order in source.orders} == {life(0), life(2)})
        assert life(1) in {peer.key for peer in port.instances[life(0)].directories[-1].peers}
        load(port, 1, num_running=0, used=0)
        source.drained.set()
        await routed(controller, routes(life(0), life(1, 2), life(2)))
        kinds = [e.kind for e in controller.events(limit=1000) if e.span == "instance:1.1"]
        assert kinds[-2:] == [EventKind.INSTANCE_DRAIN_START, EventKind.INSTANCE_DRAIN_END]


async def test_what_cannot_be_drained_says_why() -> None:
    port = FakePort(degrees=(2,))
    async with running(port, replace(ELASTIC, num_instances=2)) as controller:
        await routed(controller, routes(life(0), life(1)))
        with pytest.raises(PlanError, match="no instance 7: choose among 0 to 1"):
            await controller.drain_instance(7, 1.0)
        with pytest.raises(PlanError, match="is not drained"):
            await controller.undrain(1)
        port.instances[life(1)].waits_to_drain = True
        await controller.drain_instance(1, 30.0)
        with pytest.raises(PlanError, match="the only one that serves"):
            await controller.drain_instance(0, 1.0)
        with pytest.raises(PlanError, match="still drains"):
            await controller.undrain(1)


async def test_a_dead_instance_is_not_drained() -> None:
    port = FakePort()
    port.starts_ready = False
    async with running(port) as controller:
        await until(lambda: len(port.created) == 2)
        with pytest.raises(PlanError, match=r"instance 1\.1 is starting"):
            await controller.drain_instance(1, 1.0)


async def test_one_that_dies_while_it_is_drained_is_not_replaced() -> None:
    port = FakePort()
    async with running(port) as controller:
        await routed(controller, routes(life(0), life(1)))
        port.instances[life(1)].waits_to_drain = True
        await controller.drain_instance(1, 30.0)
        port.crash(life(1))
        await until(lambda: is_done(controller, 1))
        await controller.tick()
        assert port.created == [life(0), life(1)]


@pytest.mark.parametrize("is_over", (False, True))
async def test_the_next_controller_keeps_the_slot_empty(tmp_path: Path, is_over: bool) -> None:
    port, path = FakePort(), str(tmp_path / "events.jsonl")
    async with running(port, log=EventLog(path)) as controller:
        await routed(controller, routes(life(0), life(1)))
        port.instances[life(1)].waits_to_drain = not is_over
        await controller.drain_instance(1, 30.0)
        if is_over:
            await until(lambda: is_done(controller, 1))
    if not is_over:
        port.instances[life(1)].waits_to_drain = False
    async with running(port, log=EventLog(path)) as controller:
        await routed(controller, routes(life(0)))
        await until(lambda: is_done(controller, 1))
        for _ in range(3):
            await controller.tick()
        assert port.created == [life(0), life(1)]
        await controller.undrain(1)
        await routed(controller, routes(life(0), life(1, 2)))
    async with running(port, log=EventLog(path)) as controller:
        await routed(controller, routes(life(0), life(1, 2)))
        assert controller.snapshot().instances[1].state is InstanceState.READY


GROUPS = replace(SWITCHES, lost_after_s=30.0)


@pytest.mark.parametrize("instance_id", (0, 1))
@pytest.mark.parametrize("pair", ("tp2@(0,1)", "tp2@(0,1) tp2@(2,3)"))
async def test_a_member_of_a_group_serves_on_until_the_group_has_ended(pair: str, instance_id: int) -> None:
    port = FakePort(GROUPS.degrees)
    async with running(port, GROUPS) as controller:
        await formable(controller)
        controller.set_layout(target(pair))
        await until(lambda: all(group in layout(controller) for group in pair.split()))
        port.may_commit.clear()
        operation = await controller.drain_instance(instance_id, 60.0)
        assert operation.phase is DrainPhase.LEAVING and not operation.safe_to_delete
        await port.in_commit.wait()
        assert controller.drain_operation(instance_id).phase is DrainPhase.LEAVING
        assert controller.snapshot().leaving == (instance_id,)
        assert ("0.1", "tp2") in shapes(controller), "the group serves until its switch is over"
        assert (await controller.drain_instance(instance_id, 60.0)).id == operation.id
        port.may_commit.set()
        await until(lambda: is_done(controller, instance_id))
        assert controller.snapshot().leaving == ()
        ends = log(controller, EventKind.TRANSITION_END)
        assert ends[-1].data["what"] == "split tp2@(0,1) (carry)" and "being drained" in ends[-1].why
        for _ in range(5):
            await controller.tick()
        others = [g for g in controller.snapshot().layout.groups if instance_id not in g.members and g.degree > 1]
        assert [str(group) for group in others] == (["tp2@(2,3)"] if "(2,3)" in pair else [])


async def test_a_group_that_cannot_end_is_left_when_the_time_is_over() -> None:
    port = FakePort(GROUPS.degrees)
    async with running(port, GROUPS) as controller:
        await formable(controller)
        controller.set_layout(target("tp2@(0,1)"))
        await until(lambda: "tp2@(0,1)" in layout(controller))
        port.instances[life(0)].refusal = "a request is too long for one instance"
        await controller.drain_instance(1, 0.3)
        assert controller.drain_operation(1).phase is DrainPhase.LEAVING
        await until(lambda: is_done(controller, 1))
        assert log(controller, EventKind.TRANSITION_ERROR)


async def test_the_last_that_stays_is_not_drained_while_others_leave_their_groups() -> None:
    port = FakePort(degrees=(2,))
    async with running(port, replace(ELASTIC, num_instances=2)) as controller:
        await formable(controller, 1)
        controller.set_layout(target("tp2@(0,1)"))
        await until(lambda: "tp2@(0,1)" in layout(controller))
        port.instances[life(0)].refusal = "not now"
        await controller.drain_instance(1, 30.0)
        with pytest.raises(PlanError, match="the only one that serves"):
            await controller.drain_instance(0, 30.0)


@pytest.mark.parametrize("is_auto", (False, True))
async def test_requests_leave_a_full_instance_where_that_is_wanted(is_auto: bool) -> None:
    port = FakePort(degrees=(2,))
    config = replace(ELASTIC, migrate=MigrateConfig(is_auto=is_auto, interval_s=0.05))
    async with running(port, config) as controller:
        await routed(controller, routes(life(0), life(1), life(2)))
        load(port, 0, num_running=9, used=62)
        load(port, 2, num_running=1, used=2)
        given = port.instances[life(0)].orders
        if is_auto:
            await until(lambda: len(given) >= 2)
            assert {order.target for order in given} <= {life(1), life(2)} and not any(o.must_leave for o in given)
        else:
            await until(lambda: controller.snapshot().instances[0].stats.num_running == 9)
            for _ in range(5):
                await controller.tick()
            assert given == []


@pytest.mark.parametrize("redirects", (False, True))
async def test_what_waits_leaves_an_instance_without_room_where_that_is_wanted(redirects: bool) -> None:
    port = FakePort(degrees=(2,))
    config = replace(ELASTIC, migrate=MigrateConfig(redirects=redirects))
    async with running(port, config) as controller:
        await routed(controller, routes(life(0), life(1), life(2)))
        load(port, 0, num_running=9, num_waiting=3, used=64)
        load(port, 1, num_running=4, used=50)
        load(port, 2, num_running=1, used=2)
        given = port.instances[life(0)].orders
        if redirects:
            await until(lambda: len(given) >= 2)
            assert {order.target for order in given} == {life(2)} and all(isinstance(o, Redirect) for o in given)
            assert len({order.order_id for order in given}) == len(given)
        else:
            await until(lambda: controller.snapshot().instances[0].stats.num_waiting == 3)
            for _ in range(5):
                await controller.tick()
            assert given == []
