"""Laws of merge, split, drop and restore, one class each: every answer is right, and all memory is whole again."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from pengserve.planners.types.errors import StepError
from pengserve.planners.types.layout import Group
from pengserve.planners.types.plans import SwitchStrategy
from tests.replicas.switching.change_world import ChangeWorld

CHANGES = {"tp2": ("merge", "split"), "pp2": ("drop", "restore")}


@pytest.fixture
def worlds() -> Iterator[Any]:
    """Makes worlds."""
    made: list[ChangeWorld] = []

    def make(seed: int = 0, num_instances: int = 2) -> ChangeWorld:
        made.append(ChangeWorld(seed, num_instances))
        return made[-1]

    yield make
    for world in made:
        world.close()


def begun(world: ChangeWorld, count: int = 3, max_tokens: int = 100) -> ChangeWorld:
    """Requests that decode at each instance."""
    for at in range(len(world.keys)):
        world.send(count, at, max_tokens=max_tokens)
    world.run(lambda: all(record.tokens for record in world.ingress.records.values()))
    return world


def act(world: ChangeWorld, times: int) -> None:
    for _ in range(times):
        world.act()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", CHANGES)
def test_requests_go_along_both_ways(worlds: Any, shape: str, seed: int) -> None:
    world, group = begun(worlds(seed)), f"{shape}@(0,1)"
    report = world.change(world.plan(group, is_merge=True))
    assert report is not None and report.num_carried == 6 and report.num_recomputed == 0
    assert world.at(0).lane.name == group and world.at(0).lane.leads and not world.at(1).leads
    act(world, 150)
    world.run(lambda: not world.at(0).lane.is_exchanging)
    report = world.change(world.plan(group, is_merge=False))
    assert report is not None and report.num_recomputed == 0
    assert all(instance.lanes.running is None for instance in world.instances.values())
    world.run_to_the_end()
    assert all(record.num_sent == 1 for record in world.ingress.records.values()), "something was recomputed"


@pytest.mark.parametrize("victim", (0, 1))
@pytest.mark.parametrize("shape", CHANGES)
def test_a_member_that_fails_costs_kv_and_no_request(worlds: Any, shape: str, victim: int) -> None:
    """In the only round, or the first, of each change."""
    world, group = begun(worlds(victim)), f"{shape}@(0,1)"
    fails = lambda number, key: key == world.keys[victim]  # noqa: E731
    assert world.change(world.plan(group, is_merge=True), fails) is None
    assert all(instance.lanes.running is None for instance in world.instances.values())
    act(world, 100)
    assert world.change(world.plan(group, is_merge=True)) is not None
    act(world, 60)
    world.run(lambda: not world.at(0).lane.is_exchanging)
    assert world.change(world.plan(group, is_merge=False), fails) is None
    assert all(instance.lanes.running is None for instance in world.instances.values()), "the group has broken"
    world.run_to_the_end()


def test_a_restore_that_fails_when_blocks_are_given_costs_no_request(worlds: Any) -> None:
    world = begun(worlds())
    world.change(world.plan("pp2@(0,1)", is_merge=True))
    world.run(lambda: not world.at(0).lane.is_exchanging)
    fails = lambda number, key: number == 1 and key == world.keys[1]  # noqa: E731
    assert world.change(world.plan("pp2@(0,1)", is_merge=False), fails) is None
    world.run_to_the_end()


def test_requests_that_pause_keep_their_blocks_in_dp(worlds: Any) -> None:
    world = begun(worlds())
    report = world.change(world.plan("tp2@(0,1)", is_merge=True, strategy=SwitchStrategy.HARD))
    assert report is not None and (report.num_carried, report.num_paused) == (0, 6)
    world.send(2, 0)
    act(world, 200)
    assert world.at(0).dp.num_requests() == 3
    world.change(world.plan("tp2@(0,1)", is_merge=False))
    world.run_to_the_end()
    assert all(record.num_sent == 1 for record in world.ingress.records.values())


def test_pipelines_grow_and_are_cut(worlds: Any) -> None:
    world = begun(worlds(1, 4), 2)
    for group in ("pp2@(0,1)", "pp2@(2,3)"):
        world.change(world.plan(group, is_merge=True))
    for instance in (0, 2):
        world.run(lambda at=instance: not world.at(at).lane.is_exchanging)  # type: ignore[misc]
    parts = ("pp2@(0,1)", "pp2@(2,3)")
    report = world.change(world.plan("pp4@(0,1,2,3)", *parts, is_merge=True))
    assert report is not None and report.num_carried > 0
    act(world, 50)
    world.run(lambda: not world.at(0).lane.is_exchanging)
    assert world.change(world.plan("pp4@(0,1,2,3)", *parts, is_merge=False)) is not None
    world.run_to_the_end()


@pytest.mark.parametrize("shape", CHANGES)
def test_what_does_not_run_is_not_changed(worlds: Any, shape: str) -> None:
    world, group = worlds(), f"{shape}@(0,1)"
    with pytest.raises(StepError, match="does not run"):
        world.check(world.plan(group, is_merge=False))
    world.change(world.plan(group, is_merge=True))
    with pytest.raises(StepError, match="made for dp"):
        world.check(world.plan(group, is_merge=True))
    world.run_to_the_end()


@pytest.mark.parametrize("seed", range(3))
def test_changes_and_migrations_in_any_order(worlds: Any, seed: int) -> None:
    world = begun(worlds(seed, 4), 2, 200)
    running = {0: "", 2: ""}
    for _ in range(6):
        source, target = world.source.sample(range(4), 2)
        world.order(source, target)
        act(world, world.source.randrange(120))
        first = world.source.choice((0, 2))
        if running[first]:
            world.run(lambda at=first: not world.at(at).lane.is_exchanging)  # type: ignore[misc]
            world.change(world.plan(running[first], is_merge=False))
            running[first] = ""
        else:
            running[first] = f"{world.source.choice(('tp2', 'pp2'))}@({first},{first + 1})"
            world.change(world.plan(running[first], is_merge=True))
        act(world, world.source.randrange(60))
    for group in filter(None, running.values()):  # orders wait at members that follow
        world.run(lambda name=group: not world.at(Group.parse(name).leader).lane.is_exchanging)  # type: ignore[misc]
        world.change(world.plan(group, is_merge=False))
    world.run_to_the_end()
