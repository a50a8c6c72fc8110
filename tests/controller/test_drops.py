"""Pipelines over a cluster in memory: who may form them, how they come and go, and what the log says of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from pengserve.controller import state as transitions
from pengserve.controller.events import EventLog
from pengserve.controller.slots import Gone, Killed
from pengserve.controller.steering import SHORTAGE_PERIOD_S, Steering, decided
from pengserve.planners.selector import AT_REST, select
from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.config import ControllerConfig, DropConfig, MergeConfig
from pengserve.planners.types.errors import PlanError
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import Epoch, InstanceId
from pengserve.planners.types.layout import Group, parse_groups
from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.snapshot import ClusterSnapshot, DeviceInfo, InstanceState
from tests.controller.fakes import CAPACITY, FIRST, Clock, FakePort, answer, life
from tests.controller.test_loop import running, until
from tests.controller.test_switches import formable, layout, log, shapes, target
from tests.planners import clusters

DROP = DropConfig(max_stages=4, quiet_s=0.1, min_dwell_s=0.2)
CONFIG = ControllerConfig(
    app="test",
    num_instances=4,
    tick_s=0.02,
    status_timeout_s=0.1,
    lost_after_s=0.3,
    restart_backoff_s=0.01,
    restart_backoff_max_s=0.05,
    merge=MergeConfig(is_auto=False),
    drop=DROP,
    prepare_timeout_s=0.2,
    commit_timeout_s=0.3,
)
AUTO = replace(CONFIG, merge=MergeConfig(is_auto=True))
APART, PIPED = "dp@(0) dp@(1) dp@(2) dp@(3)", "pp2@(0,1) dp@(2) dp@(3)"


def fake_port(degrees: tuple[int, ...] = ()) -> FakePort:
    return FakePort(degrees, DROP.max_stages)


# By hand


async def test_a_pinned_pipeline_is_reached_by_a_drop_and_left_by_a_restore() -> None:
    port = fake_port()
    async with running(port, CONFIG) as controller:
        await formable(controller)
        controller.set_layout(target("pp2@(0,1)"))
        await until(lambda: layout(controller) == PIPED)
        assert shapes(controller) == {("0.1", "pp2"), ("2.1", "dp"), ("3.1", "dp")}
        assert controller._state is not None
        route = controller._state.routing.routes[0]
        assert route.members == (0, 1) and route.max_model_len == 32 * (2 * 64 + 256)
        assert controller._state.routing.max_model_len == CAPACITY.max_model_len, "no pipeline is formed for length"
        port.carry(life(0), 100)
        controller.set_layout(target("dp@(0)"))
        await until(lambda: layout(controller) == APART)
        starts, ends = log(controller, EventKind.TRANSITION_START), log(controller, EventKind.TRANSITION_END)
        assert [e.data["what"] for e in ends] == ["drop pp2@(0,1) (carry)", "restore pp2@(0,1) (carry)"]
        assert [e.data["switch"] for e in starts] == ["drop", "restore"]
        assert [e.data["shape"] for e in ends] == ["pp2", "pp2"]


async def test_a_pinned_pipeline_grows_and_is_cut_by_one_switch_each() -> None:
    port = fake_port()
    async with running(port, CONFIG) as controller:
        await formable(controller)
        for text in ("pp2@(0,1)", "pp4@(0..3)", "pp2@(0,1) pp2@(2,3)"):
            controller.set_layout(target(text))
            wanted = " ".join(map(str, parse_groups(text)))
            await until(lambda wanted=wanted: layout(controller).startswith(wanted))  # type: ignore[misc]
            for group in controller.snapshot().layout.groups:
                port.carry(life(group.leader), 1)
        ends = log(controller, EventKind.TRANSITION_END)
        four = "pp4@(0,1,2,3) (carry)"
        assert [e.data["what"] for e in ends] == ["drop pp2@(0,1) (carry)", f"drop {four}", f"restore {four}"]
        assert layout(controller) == "pp2@(0,1) pp2@(2,3)"


async def test_a_pinned_pipeline_survives_its_controller(tmp_path: Path) -> None:
    port, path = fake_port(), str(tmp_path / "events.jsonl")
    async with running(port, CONFIG, EventLog(path)) as controller:
        await formable(controller)
        controller.set_layout(target("pp2@(0,1)"))
        await until(lambda: layout(controller) == PIPED)
    async with running(port, CONFIG, EventLog(path)) as controller:
        await controller.recovered(5)
        assert layout(controller) == PIPED and not controller.snapshot().policy.is_auto
        assert list(map(str, controller.snapshot().policy.target)) == PIPED.split()


async def test_a_pipeline_that_cannot_be_is_refused_with_those_that_can() -> None:
    async with running(fake_port(), CONFIG) as controller:
        await formable(controller)
        with pytest.raises(PlanError, match=r"pp2@\(1,2\) cannot be formed: choose among pp2@\(0,1\) pp2@\(2,3\) pp4"):
            controller.set_layout(target("pp2@(1,2)"))
        with pytest.raises(PlanError, match=r"tp2@\(0,1\) cannot be formed"):
            controller.set_layout(target("tp2@(0,1)"))


async def test_a_dead_stage_dissolves_its_pipeline() -> None:
    port = fake_port()
    async with running(port, CONFIG) as controller:
        await formable(controller)
        controller.set_layout(target("pp2@(0,1)"))
        await until(lambda: layout(controller) == PIPED)
        port.starts_ready = False
        port.crash(life(1))
        port.fall_back(life(0))
        await until(lambda: ("0.1", "dp") in shapes(controller))
        assert "pp2@(0,1) has ended" in log(controller, EventKind.LAYOUT_CHANGED)[-1].why


# By memory


async def test_a_burst_drops_parameters_and_its_end_brings_them_back() -> None:
    port = fake_port((2,))
    async with running(port, replace(AUTO, degrees=(2,))) as controller:
        await formable(controller, 5)
        for i in range(4):
            port.carry(life(i), 80 if i == 2 else 40)
        await until(lambda: layout(controller) == "dp@(0) dp@(1) pp2@(2,3)")
        port.carry(life(2), 120)
        await until(lambda: log(controller, EventKind.TRANSITION_END) != [])
        port.carry(life(2), 50)
        await until(lambda: layout(controller) == APART)
        verbs = [event.data["switch"] for event in log(controller, EventKind.TRANSITION_END)]
        assert verbs == ["drop", "restore"]
        decided = log(controller, EventKind.PLAN_DECIDED)
        assert [(e.data["action"], e.data["group"]) for e in decided] == [
            ("drop", "pp2@(2,3)"),
            ("restore", "pp2@(2,3)"),
        ]
        assert decided[0].why == log(controller, EventKind.TRANSITION_START)[0].why
        assert [option["action"] for option in decided[0].data["options"]] == ["keep", "drop"]


async def test_a_pipeline_that_was_pinned_is_restored_once_it_is_released() -> None:
    port = fake_port()
    async with running(port, AUTO) as controller:
        await formable(controller)
        controller.set_layout(target("pp2@(0,1)"))
        await until(lambda: layout(controller) == PIPED)
        port.carry(life(0), 1)
        controller.auto_layout()
        await until(lambda: layout(controller) == APART)


async def test_without_stages_nothing_of_it_is_there() -> None:
    port = FakePort((2,))
    config = replace(AUTO, degrees=(2,), drop=DropConfig(), merge=MergeConfig(is_auto=True, quiet_s=0))
    async with running(port, config) as controller:
        await until(lambda: len(log(controller, EventKind.TRANSITION_END)) == 2)
        assert layout(controller) == "tp2@(0,1) tp2@(2,3)"
        assert not log(controller, EventKind.PLAN_DECIDED)
        assert {spec.group.kind for spec in port.instances[life(0)].directories[-1].groups} == {"tp"}


# Decisions in the log

FULL = clusters.stats("dp", 16, 0, clusters.NUM_BLOCKS)


def steering(clock: Clock) -> Steering:
    return Steering(AUTO, clock)


def decisions(steering: Steering, *seen: ClusterSnapshot) -> list[tuple[str, str]]:
    news = [change for look in seen for change in steering.next_switch(look)[1]]
    assert all(change.kind is EventKind.PLAN_DECIDED for change in news)
    return [(change.data["action"], change.data["group"]) for change in news]


def test_a_decision_is_told_when_it_changes_and_rest_is_not() -> None:
    full, idle = clusters.snapshot(2, "", {0: FULL}, max_stages=2, degrees=()), clusters.snapshot(2, degrees=())
    drop = ("drop", "pp2@(0,1)")
    assert decisions(steering(Clock()), idle, full, full, idle, idle, full) == [drop, drop]


def test_missing_instances_are_told_once_in_a_while_and_later_where_they_last() -> None:
    clock = Clock()
    steers = steering(clock)
    idle = clusters.snapshot(2, degrees=())
    short = replace(clusters.snapshot(2, "", {0: FULL}, max_stages=2, degrees=()), groups=())
    assert decisions(steers, short, idle, short, idle, short) == [("keep", "")]
    clock.now_s += SHORTAGE_PERIOD_S
    assert decisions(steers, short, short, idle) == [("keep", "")]


def test_a_decision_reads_back_from_the_log() -> None:
    full = clusters.snapshot(2, "", {0: FULL}, max_stages=2, degrees=())
    _, _, decision = select(full, MergeConfig(), DROP, Steering(AUTO, Clock())._history)
    change = decided(decision, 0.0)
    event = Event(seq=1, time_s=0, kind=change.kind, why=change.why, data=change.data)
    assert from_data(Event, to_data(event)) == event
    assert change.data["needs_instances"] is False and change.data["price_s"] > 0
    assert decided(AT_REST, 0.0).data["group"] == ""


# The pure state


def started(config: ControllerConfig, nodes: list[str] | None = None) -> transitions.ClusterState:
    state = transitions.empty(config, version=FIRST, epoch=Epoch(1))
    state = transitions.create(state, [InstanceId(i) for i in range(config.num_instances)], "begin", 0).state
    stages = config.drop.max_stages
    said = [
        answer(life(i), InstanceState.READY, degrees=config.degrees, max_stages=stages)
        for i in range(config.num_instances)
    ]
    if nodes is not None:
        said = [replace(s, device=DeviceInfo(node_id=n, device="cuda:0")) for s, n in zip(said, nodes, strict=True)]
    return transitions.observe(state, [(s.key, s) for s in said], 0).state


def test_pipelines_span_nodes_and_tp_groups_do_not() -> None:
    config = replace(CONFIG, degrees=(2, 4))
    state = started(config, ["a", "b", "b", "c"])
    names = [str(spec.group) for spec in state.wiring.directory.groups]
    assert names == ["tp2@(1,2)", "pp2@(0,1)", "pp2@(2,3)", "pp4@(0,1,2,3)"]


def test_a_pipeline_in_use_keeps_its_communicators_where_ranks_shift() -> None:
    state = started(replace(CONFIG, lost_after_s=1000))
    group = Group.parse("pp2@(0,1)")
    members = (life(0), life(1))
    plan = SwitchPlan(plan_id="d", epoch=state.layout.epoch, group=group, members=members, is_merge=True)
    said = [replace(answer(m, InstanceState.READY, max_stages=4), lane=str(group), epoch=Epoch(2)) for m in members]
    state = transitions.begin_switch(state, plan).state
    report = transitions.SwitchReport(plan_id="d", epoch=Epoch(2))
    state = transitions.end_switch(state, plan, report, {}, 1).state
    state = transitions.observe(state, [(s.key, s) for s in said], 1).state
    state = transitions.observe(state, [(life(3), Gone("SIGKILL")), (life(3), Killed())], 2).state
    state = transitions.create(state, [InstanceId(3)], "again", 2).state
    moved = replace(answer(life(3, 2), InstanceState.READY, max_stages=4), device=DeviceInfo(node_id="m"))
    state = transitions.observe(state, [(life(3, 2), moved)], 2).state
    assert state.wiring.topology.ranks == (3, 0, 1, 2)
    names = {str(spec.group) for spec in state.wiring.directory.groups}
    assert names == {"pp2@(3,0)", "pp2@(1,2)", "pp4@(3,0,1,2)", "pp2@(0,1)"}
    state = transitions.observe(state, [(life(1), Gone("SIGKILL"))], 3).state
    assert [str(g) for g in state.layout.groups] == APART.split()
