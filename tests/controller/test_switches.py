"""Switches of the layout over a cluster in memory: prepare, commit, abort, and deaths in between."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from pengserve.controller.events import EventLog, open_starts
from pengserve.controller.loop import Controller
from pengserve.planners.types.config import ControllerConfig, MergeConfig
from pengserve.planners.types.errors import PlanError
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import NO_VERSION
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import LayoutTarget
from pengserve.planners.types.snapshot import Demand, InstanceState
from tests.controller.fakes import FakePort, answer, life
from tests.controller.test_loop import routed, running, until

CONFIG = ControllerConfig(
    app="test",
    num_instances=4,
    tick_s=0.02,
    status_timeout_s=0.1,
    lost_after_s=0.3,
    restart_backoff_s=0.01,
    restart_backoff_max_s=0.05,
    degrees=(2, 4),
    merge=MergeConfig(is_auto=False),
    prepare_timeout_s=0.2,
    commit_timeout_s=0.3,
)
PAIR = "tp2@(0,1) dp@(2) dp@(3)"


def target(text: str) -> LayoutTarget:
    return LayoutTarget(groups=tuple(Group.parse(word) for word in text.replace(";", " ").split()))


def layout(controller: Controller) -> str:
    return " ".join(str(group) for group in controller.snapshot().layout.groups)


def shapes(controller: Controller) -> set[tuple[str, str]]:
    """Whom requests go to, and the shape they find there."""
    assert controller._state is not None
    return {(str(route.key), route.shape) for route in controller._state.routing.routes}


def log(controller: Controller, *kinds: EventKind) -> list[Event]:
    return [event for event in controller.events(limit=10_000) if event.kind in kinds]


async def formable(controller: Controller, num_groups: int = 3) -> None:
    """All groups of four instances can be formed: two pairs, and all four."""
    await until(lambda: controller._state is not None and len(controller.snapshot().groups) == num_groups)


async def test_a_pinned_layout_is_reached_by_a_merge_and_left_by_a_split() -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, CONFIG) as controller:
        await formable(controller)
        before = controller.snapshot()
        controller.set_layout(target("tp2@(0,1)"))
        table = await routed(controller, lambda table: len(table.routes) == 3)
        assert layout(controller) == PAIR
        first = table.routes[0]
        assert (str(first.key), first.shape, first.max_model_len) == ("0.1", "tp2", 2048)
        assert len(table.addresses) == 4, "a follower keeps its links"
        assert table.max_model_len == 4096, "all four together"
        assert table.epoch == controller.snapshot().epoch == before.epoch + 1
        assert not controller.snapshot().policy.is_auto
        controller.set_layout(target("dp@(0)"))
        await until(lambda: layout(controller) == "dp@(0) dp@(1) dp@(2) dp@(3)")
        assert controller.snapshot().epoch == before.epoch + 2
        starts = log(controller, EventKind.TRANSITION_START)
        ends = log(controller, EventKind.TRANSITION_END)
        assert [e.span for e in starts] == [e.span for e in ends]
        assert [e.data["what"] for e in ends] == ["merge tp2@(0,1) (carry)", "split tp2@(0,1) (carry)"]
        assert ends[0].data["num_carried"] == 3 and ends[0].data["cutover_s"] == 0.01
        record = controller.snapshot().last_switch
        assert record is not None and (record.phase, record.what) == ("done", "split tp2@(0,1) (carry)")
        assert [c for c in port.calls if c[0] == "commit" and c[1] != life(0)] == []


async def test_each_epoch_is_told_once_with_a_reason() -> None:
    async with running(FakePort(CONFIG.degrees), CONFIG) as controller:
        await formable(controller)
        controller.set_layout(target("tp4@(0..3)"))
        await until(lambda: layout(controller) == "tp4@(0,1,2,3)")
        controller.set_layout(target("tp2@(0,1) tp2@(2,3)"))
        await until(lambda: layout(controller) == "tp2@(0,1) tp2@(2,3)")
        changes = log(controller, EventKind.LAYOUT_CHANGED)
        epochs = [event.data["epoch"] for event in changes]
        assert epochs == list(range(epochs[0], epochs[0] + 5)), "tp4, split, and two merges"
        assert all(event.why for event in changes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tp2@(1,2)", r"tp2@\(1,2\) cannot be formed: choose among tp2@\(0,1\)"),
        ("tp2@(0,9)", "no instance 9"),
        ("tp2@(0,1);dp@(1)", "in two groups"),
    ],
)
async def test_an_impossible_layout_is_refused_at_once(text: str, why: str) -> None:
    async with running(FakePort(CONFIG.degrees), CONFIG) as controller:
        await formable(controller)
        with pytest.raises(PlanError, match=why):
            controller.set_layout(target(text))
        assert controller.snapshot().policy.target == ()


@pytest.mark.parametrize("member", [0, 1])
async def test_a_member_that_cannot_take_part_aborts_the_switch_for_all(member: int) -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, CONFIG) as controller:
        await formable(controller)
        port.instances[life(member)].refusal = "its tp2 lane is busy"
        controller.set_layout(target("tp2@(0,1)"))
        await until(lambda: len(log(controller, EventKind.TRANSITION_ERROR)) >= 2)
        assert "its tp2 lane is busy" in log(controller, EventKind.TRANSITION_ERROR)[0].why
        assert not log(controller, EventKind.TRANSITION_END) and len(shapes(controller)) == 4
        first = port.calls[0][2]
        assert {c[1] for c in port.calls if c[::2] == ("abort", first)} == {life(0), life(1)}
        assert not [c for c in port.calls if c[0] == "commit"]
        names = [e.span for e in log(controller, EventKind.TRANSITION_START)]
        assert len(set(names)) == len(names), "no name is used twice"
        port.instances[life(member)].refusal = ""
        await until(lambda: layout(controller) == PAIR)


async def test_a_member_that_does_not_answer_a_prepare_aborts_the_switch() -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, CONFIG) as controller:
        await formable(controller)
        port.instances[life(1)].deaf_to = {"prepare", "abort"}
        controller.set_layout(target("tp2@(0,1)"))
        await until(lambda: bool(log(controller, EventKind.TRANSITION_ERROR)))
        assert "1.1" in log(controller, EventKind.TRANSITION_ERROR)[0].why
        port.instances[life(1)].deaf_to = set()
        await until(lambda: layout(controller) == PAIR)


async def test_a_layout_that_changes_elsewhere_in_a_prepare_leaves_the_switch_alone() -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, replace(CONFIG, prepare_timeout_s=5)) as controller:
        await formable(controller)
        controller.set_layout(target("tp2@(2,3)"))
        await until(lambda: ("2.1", "tp2") in shapes(controller))
        port.may_prepare.clear()
        controller.set_layout(target("tp2@(0,1) tp2@(2,3)"))
        await until(lambda: port.calls[-1][:2] == ("prepare", life(1)))
        plan_id = port.calls[-1][2]
        port.crash(life(3))
        port.fall_back(life(2))
        await until(lambda: ("2.1", "dp") in shapes(controller))
        port.may_prepare.set()
        await until(lambda: shapes(controller) == {("0.1", "tp2"), ("2.1", "tp2")})
        assert ("commit", life(0), plan_id) in port.calls
        assert not log(controller, EventKind.TRANSITION_ERROR)
        epochs = [event.data["epoch"] for event in log(controller, EventKind.LAYOUT_CHANGED)]
        assert epochs == sorted(set(epochs)), "the switch ends in an epoch above those of the changes meanwhile"


async def test_switches_of_disjoint_groups_run_side_by_side() -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, replace(CONFIG, prepare_timeout_s=5)) as controller:
        await formable(controller)
        before = controller.snapshot().epoch
        port.may_prepare.clear()
        controller.set_layout(target("tp2@(0,1) tp2@(2,3)"))
        await until(lambda: len(controller.snapshot().switching) == 2)
        port.may_prepare.set()
        await until(lambda: layout(controller) == "tp2@(0,1) tp2@(2,3)")
        kinds = [e.kind for e in log(controller, EventKind.TRANSITION_START, EventKind.TRANSITION_END)]
        assert kinds == [EventKind.TRANSITION_START] * 2 + [EventKind.TRANSITION_END] * 2
        assert controller.snapshot().epoch == before + 2 and not controller.snapshot().switching


async def test_a_switch_that_fails_undoes_only_itself() -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, CONFIG) as controller:
        await formable(controller)
        port.instances[life(1)].refusal = "it cannot"
        controller.set_layout(target("tp2@(0,1) tp2@(2,3)"))
        await until(lambda: layout(controller) == "dp@(0) dp@(1) tp2@(2,3)")
        await until(lambda: bool(log(controller, EventKind.TRANSITION_ERROR)))
        assert layout(controller) == "dp@(0) dp@(1) tp2@(2,3)"
        assert {e.data["what"] for e in log(controller, EventKind.TRANSITION_ERROR)} == {"merge tp2@(0,1) (carry)"}
        port.instances[life(1)].refusal = ""
        await until(lambda: layout(controller) == "tp2@(0,1) tp2@(2,3)")


async def test_after_a_failure_only_the_members_of_that_switch_rest() -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, replace(CONFIG, restart_backoff_s=60.0, restart_backoff_max_s=60.0)) as controller:
        await formable(controller)
        port.instances[life(1)].refusal = "it cannot"
        controller.set_layout(target("tp2@(0,1) tp2@(2,3)"))
        await until(lambda: layout(controller) == "dp@(0) dp@(1) tp2@(2,3)")
        await until(lambda: bool(log(controller, EventKind.TRANSITION_ERROR)))
        port.fall_back(life(2))
        port.fall_back(life(3))
        await until(lambda: len(log(controller, EventKind.TRANSITION_END)) == 2)
        assert layout(controller) == "dp@(0) dp@(1) tp2@(2,3)", "it was formed again at once"
        assert [str(plan.group) for plan in controller.snapshot().resting] == ["tp2@(0,1)"]
        assert len(log(controller, EventKind.TRANSITION_ERROR)) == 1
        port.instances[life(1)].refusal = ""
        controller.set_layout(target("tp2@(0,1) tp2@(2,3)"))  # who asks again need not wait
        await until(lambda: layout(controller) == "tp2@(0,1) tp2@(2,3)")


async def test_a_refused_commit_leaves_the_layout_as_it_was() -> None:
    port = FakePort(CONFIG.degrees)
    port.commit_error = "a member did not come"
    async with running(port, CONFIG) as controller:
        await formable(controller)
        epoch = controller.snapshot().epoch
        controller.set_layout(target("tp2@(0,1)"))
        await until(lambda: bool(log(controller, EventKind.TRANSITION_ERROR)))
        assert controller.snapshot().epoch == epoch and len(shapes(controller)) == 4
        assert all(instance.prepared is None for instance in port.instances.values()), "all were told to forget it"
        port.commit_error = ""
        await until(lambda: layout(controller) == PAIR)
        assert controller.snapshot().epoch == epoch + 1


async def test_a_commit_whose_answer_is_lost_counts_by_what_the_members_say() -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, CONFIG) as controller:
        await formable(controller)
        port.instances[life(0)].deaf_to = {"commit"}
        controller.set_layout(target("tp2@(0,1)"))
        await until(lambda: port.instances[life(1)].said.lane != "dp")
        assert layout(controller) != PAIR, "while a switch is under way, only its end counts"
        await until(lambda: layout(controller) == PAIR)
        assert "no answer" in log(controller, EventKind.TRANSITION_ERROR)[0].why
        assert ("0.1", "tp2") in shapes(controller)


async def test_supervision_goes_on_while_a_commit_hangs_and_a_dead_leader_ends_it() -> None:
    port = FakePort(CONFIG.degrees)
    port.may_commit.clear()
    async with running(port, CONFIG) as controller:
        await formable(controller)
        controller.set_layout(target("tp2@(0,1)"))
        await port.in_commit.wait()
        port.crash(life(3))
        await routed(controller, lambda table: life(3, 2) in {route.key for route in table.routes})
        assert not log(controller, EventKind.TRANSITION_ERROR), "the commit still hangs"
        port.crash(life(0))
        await until(lambda: bool(log(controller, EventKind.TRANSITION_ERROR)))
        assert "0.1 has ended" in log(controller, EventKind.TRANSITION_ERROR)[0].why
        port.may_commit.set()
        await until(lambda: layout(controller) == PAIR)
        assert ("0.2", "tp2") in shapes(controller), "with its new life, since the wish still stands"


@pytest.mark.parametrize("dead", [0, 1])
async def test_a_dead_member_dissolves_its_group(dead: int) -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, CONFIG) as controller:
        await formable(controller)
        controller.set_layout(target("tp2@(0,1)"))
        await until(lambda: layout(controller) == PAIR)
        port.starts_ready = False
        port.crash(life(dead))
        port.fall_back(life(1 - dead))
        await until(lambda: (f"{1 - dead}.1", "dp") in shapes(controller))
        assert layout(controller) == "dp@(0) dp@(1) dp@(2) dp@(3)"
        assert "tp2@(0,1) has ended" in log(controller, EventKind.LAYOUT_CHANGED)[-1].why
        await until(lambda: life(dead, 2) in port.instances)
        port.instances[life(dead, 2)].said = answer(life(dead, 2), InstanceState.READY, degrees=CONFIG.degrees)
        await until(lambda: layout(controller) == PAIR)


async def test_a_survivor_that_reports_dp_is_believed() -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, replace(CONFIG, merge=MergeConfig(is_auto=False))) as controller:
        await formable(controller)
        controller.set_layout(target("tp2@(0,1)"))
        await until(lambda: layout(controller) == PAIR)
        port.instances[life(0)].refusal = port.instances[life(1)].refusal = "not again"
        port.fall_back(life(0))
        await until(lambda: ("0.1", "dp") in shapes(controller))
        assert ("1.1", "dp") not in shapes(controller), "the other one still says that it follows"
        port.fall_back(life(1))
        await until(lambda: ("1.1", "dp") in shapes(controller))


async def test_a_new_controller_finds_the_layout_as_it_is_and_keeps_the_wish(tmp_path: Path) -> None:
    port, path = FakePort(CONFIG.degrees), str(tmp_path / "events.jsonl")
    async with running(port, CONFIG, EventLog(path)) as controller:
        await formable(controller)
        controller.set_layout(target("tp2@(0,1)"))
        await until(lambda: layout(controller) == PAIR)
        before = controller.snapshot()
    async with running(port, CONFIG, EventLog(path)) as controller:
        table = await controller.routing(NO_VERSION, 5)
        assert [(str(r.key), r.shape) for r in table.routes] == [("0.1", "tp2"), ("2.1", "dp"), ("3.1", "dp")]
        assert table.epoch > before.epoch
        assert log(controller, EventKind.LAYOUT_CHANGED)[-1].why == "the instances run it so"
        assert controller.snapshot().policy == before.policy
        versions = [d.version for d in port.instances[life(0)].directories]
        await until(lambda: len(port.instances[life(0)].directories) > len(versions))
        assert port.instances[life(0)].directories[-1].version > versions[-1]
        controller.set_layout(target("dp@(0)"))
        await until(lambda: len(shapes(controller)) == 4)


async def test_a_controller_that_dies_in_a_switch_harms_nothing(tmp_path: Path) -> None:
    port, path = FakePort(CONFIG.degrees), str(tmp_path / "events.jsonl")
    port.may_commit.clear()
    async with running(port, CONFIG, EventLog(path)) as controller:
        await formable(controller)
        controller.set_layout(target("tp2@(0,1)"))
        await port.in_commit.wait()
    (plan,) = {instance.prepared for instance in port.instances.values() if instance.prepared}
    port.switch(plan)  # the leader went on without a controller
    async with running(port, CONFIG, EventLog(path)) as controller:
        await controller.recovered(5)
        assert layout(controller) == PAIR
        assert open_starts(controller.events(limit=1000)) == ()
        assert controller.snapshot().epoch > plan.epoch + 1


async def test_directories_follow_the_lives_and_are_told_once() -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, CONFIG) as controller:
        await formable(controller)
        first = port.instances[life(0)].directories[-1]
        assert [str(spec.group) for spec in first.groups] == ["tp2@(0,1)", "tp2@(2,3)", "tp4@(0,1,2,3)"]
        assert [peer.endpoint for peer in first.peers] == [f"127.0.0.1:3{i}001" for i in range(4)]
        port.crash(life(1))
        await until(lambda: life(1, 2) in port.instances)
        await formable(controller)
        newest = port.instances[life(0)].directories[-1]
        names = {str(spec.group): spec.name for spec in newest.groups}
        assert names["tp2@(0,1)"] == "tp2@(0,1)/0.1-1.2/0" and names["tp2@(2,3)"] == "tp2@(2,3)/2.1-3.1/0"
        versions = [d.version for d in port.instances[life(0)].directories]
        assert versions == sorted(set(versions)), "each version is told once"
        between = [d for d in port.instances[life(0)].directories if first.version < d.version < newest.version]
        groups = {str(spec.group) for d in between for spec in d.groups}
        assert groups <= {"tp2@(2,3)"}, "an empty slot does not shift its neighbours into other groups"


async def test_a_group_that_failed_gets_a_new_round() -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, CONFIG) as controller:
        await until(lambda: life(0) in port.instances)
        port.instances[life(0)].broken = {f"tp2@(0,1)/0.1-1.1/{n}" for n in range(2)}
        await formable(controller)
        names = {spec.name for spec in port.instances[life(1)].directories[-1].groups}
        assert names == {"tp2@(0,1)/0.1-1.1/2", "tp2@(2,3)/2.1-3.1/0", "tp4@(0,1,2,3)/0.1-1.1-2.1-3.1/0"}


async def test_an_instance_that_takes_no_directory_is_told_again_and_holds_up_nobody() -> None:
    port = FakePort(CONFIG.degrees)
    async with running(port, CONFIG) as controller:
        await until(lambda: life(1) in port.instances)
        port.instances[life(1)].deaf_to = {"connect"}
        await formable(controller, 1)
        assert len(shapes(controller)) == 4
        port.instances[life(1)].deaf_to = set()
        await formable(controller)


async def test_a_demand_wakes_the_loop_and_is_forgotten() -> None:
    port = FakePort(CONFIG.degrees)
    config = replace(CONFIG, tick_s=60, merge=MergeConfig(is_auto=True, min_dwell_s=0))
    async with running(port, config) as controller:
        formed = asyncio.create_task(formable(controller))
        while not formed.done():  # nothing ticks by itself for a minute
            controller.report_lost(life(0), "just to look")
            await asyncio.sleep(0.03)
        await formed
        controller.report_demand("ingress", Demand(num_waiting=1, longest_waiting_tokens=1500))
        await until(lambda: any(shape == "tp2" for _, shape in shapes(controller)))
        assert controller.snapshot().demands
        controller.report_demand("ingress", Demand())
        assert not controller.snapshot().demands


async def test_stop_ends_a_switch_under_way_in_the_log() -> None:
    port = FakePort(CONFIG.degrees)
    port.may_commit.clear()
    async with running(port, CONFIG) as controller:
        await formable(controller)
        controller.set_layout(target("tp2@(0,1)"))
        await port.in_commit.wait()
        await controller.stop()
        assert open_starts(log(controller, EventKind.TRANSITION_START, EventKind.TRANSITION_ERROR)) == ()


async def test_a_cluster_without_degrees_has_no_directories() -> None:
    port = FakePort()
    async with running(port, replace(CONFIG, degrees=())) as controller:
        await routed(controller, lambda table: len(table.routes) == 4)
        with pytest.raises(PlanError, match="no tensor-parallel group is possible"):
            controller.set_layout(target("tp2@(0,1)"))
        assert all(not instance.directories for instance in port.instances.values())
