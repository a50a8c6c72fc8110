"""Laws of merge, split, drop and restore, one class each: every answer is right, and all memory is whole again."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from pengserve.planners.types.errors import StepError
from pengserve.planners.types.layout import Group
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.replicas.engine.lanes import lane as lane_module
from tests.replicas.migration.sum_lanes import BLOCK
from tests.replicas.switching.change_world import NUM_BLOCKS, ChangeWorld

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


GROWN = [  # what four instances run before they become tp4
    ("tp2@(0,1)", "tp2@(2,3)"),
    ("tp2@(0,1)", "dp@(2)", "dp@(3)"),
    ("dp@(0)", "dp@(1)", "tp2@(2,3)"),
]


WIDE = "tp4@(0,1,2,3)"


def paired(world: ChangeWorld, parts: tuple[str, ...], count: int = 3, **kwargs: Any) -> ChangeWorld:
    """Requests that decode in each of `parts`."""
    for part in map(Group.parse, parts):
        if part.degree > 1:
            assert world.change(world.plan(str(part), is_merge=True)) is not None
    for part in map(Group.parse, parts):
        world.send(count, part.leader, **kwargs)
    world.run(lambda: all(record.tokens for record in world.ingress.records.values()))
    return world


def all_run(world: ChangeWorld, name: str) -> bool:
    return all(i.lanes.running is not None and i.lanes.running.name == name for i in world.instances.values())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("parts", GROWN)
def test_narrower_groups_become_a_wider_one_as_they_are(worlds: Any, parts: tuple[str, ...], seed: int) -> None:
    world = paired(worlds(seed, 4), parts, max_tokens=100)
    report = world.change(world.plan(WIDE, *parts, is_merge=True))
    assert report is not None and report.num_carried == 3 * len(parts) and report.num_recomputed == 0
    assert all_run(world, WIDE)
    act(world, 150)
    assert world.change(world.plan(WIDE, is_merge=False)) is not None
    world.run_to_the_end()
    assert all(record.num_sent == 1 for record in world.ingress.records.values()), "something was recomputed"


@pytest.mark.parametrize("family", ["", "one"])
@pytest.mark.parametrize("parts", GROWN)
def test_full_groups_grow_without_recomputing(
    worlds: Any, parts: tuple[str, ...], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hardly one request fits into what is free: waves live on the blocks that they free, at all members of a part."""
    monkeypatch.setattr("pengserve.planners.waves.MAX_WAVE_TOKENS", 400)
    world = paired(worlds(3, 4), parts, 0)
    num_needed = NUM_BLOCKS // 12  # blocks of tp4: three requests for each member
    num_tokens = num_needed * 4 * BLOCK - 1
    num_new = 70 if len(parts) == 2 else 300  # one that is alone reads its requests while the group still does
    for part in map(Group.parse, parts):
        world.send(3 * part.degree, part.leader, num_prompt=num_tokens - num_new, max_tokens=num_new, family=family)
    lanes = [world.at(part.leader).lane for part in map(Group.parse, parts)]

    def all_decode() -> bool:
        requests = [request for lane in lanes for request in lane.requests()]
        return len(requests) == 12 and all(request.num_output_tokens for request in requests)

    world.run(all_decode)
    if not family and len(parts) == 2:
        assert max(lane.num_available() for lane in lanes) < 2 * num_needed, "they are not full"
    report = world.change(world.plan(WIDE, *parts, is_merge=True))
    assert report is not None and (report.num_carried, report.num_recomputed) == (12, 0)
    world.run_to_the_end()
    assert all(record.num_sent == 1 for record in world.ingress.records.values())


@pytest.mark.parametrize("parts", GROWN)
def test_a_group_that_has_nothing_to_bring_grows_too(worlds: Any, parts: tuple[str, ...]) -> None:
    world = paired(worlds(0, 4), parts, 0)
    assert world.change(world.plan(WIDE, *parts, is_merge=True)) is not None and all_run(world, WIDE)
    world.send(2)
    world.run_to_the_end()


def test_no_member_can_take_a_merge_for_committed_in_which_it_had_no_part(worlds: Any) -> None:
    """Also where nothing moves there is a round."""
    world = paired(worlds(0, 4), GROWN[0], 0)
    assert world.change(world.plan(WIDE, *GROWN[0], is_merge=True), lambda number, key: number == 0) is None


def test_what_a_group_has_beside_requests_that_move_goes_on_from_its_tokens(
    worlds: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait, and one that cannot be carried though others share its blocks."""
    world = paired(worlds(2, 4), GROWN[0], 4, family="one", max_tokens=100)
    stays = next(request.request_id for request in world.at(2).lane.requests())
    monkeypatch.setattr(lane_module, "can_carry", lambda r: r.num_computed_tokens > 0 and r.request_id != stays)
    world.send(8, 2)
    world.run(lambda: bool(world.at(2).lane.scheduler.counts()[1]))
    num_waiting = sum(not request.num_computed_tokens for request in world.at(2).lane.requests())
    report = world.change(world.plan(WIDE, *GROWN[0], is_merge=True))
    assert report is not None and report.num_recomputed == 0
    assert num_waiting and report.num_carried < 16 - num_waiting
    world.run_to_the_end()
    assert sum(record.num_sent > 1 for record in world.ingress.records.values()) == num_waiting + 1


def test_blocks_that_a_group_has_leased_and_does_not_use_are_there_for_others(worlds: Any) -> None:
    parts, num_tokens = GROWN[0], NUM_BLOCKS // 12 * 4 * BLOCK - 1
    world = paired(worlds(4, 4), parts, 0)
    world.send(6, 0, num_prompt=num_tokens - 70, max_tokens=70)
    world.run_to_the_end()
    assert world.at(0).dp.num_free() < 20, "the group keeps its leases"
    world.send(6, 2, num_prompt=num_tokens - 70, max_tokens=70)
    lane = world.at(2).lane
    world.run(lambda: len(lane.requests()) == 6 and all(request.num_output_tokens for request in lane.requests()))
    report = world.change(world.plan(WIDE, *parts, is_merge=True))
    assert report is not None and (report.num_carried, report.num_recomputed) == (6, 0)
    world.run_to_the_end()


@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("parts", GROWN)
@pytest.mark.parametrize("number", range(2))
def test_a_member_that_fails_while_groups_grow_costs_no_request(
    worlds: Any, parts: tuple[str, ...], victim: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first round, and in one after KV has moved."""
    monkeypatch.setattr("pengserve.planners.waves.MAX_WAVE_TOKENS", 100)
    world = paired(worlds(victim, 4), parts, max_tokens=100)
    fails = lambda n, key: n == number and key == world.keys[victim]  # noqa: E731
    assert world.change(world.plan(WIDE, *parts, is_merge=True), fails) is None
    assert all(instance.lanes.running is None for instance in world.instances.values())
    act(world, 100)
    assert world.change(world.plan(WIDE, is_merge=True)) is not None
    world.run_to_the_end()


def test_requests_of_a_group_go_along_where_others_pause(worlds: Any) -> None:
    parts = GROWN[1]
    world = paired(worlds(0, 4), parts, max_tokens=100)
    report = world.change(world.plan(WIDE, *parts, is_merge=True, strategy=SwitchStrategy.HARD))
    assert report is not None and (report.num_carried, report.num_paused) == (3, 6)
    act(world, 200)
    world.change(world.plan(WIDE, is_merge=False))
    world.run_to_the_end()
    assert all(record.num_sent == 1 for record in world.ingress.records.values())


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


@pytest.mark.parametrize("seed", range(4))
def test_groups_grow_between_migrations_in_any_order(worlds: Any, seed: int) -> None:
    world = begun(worlds(seed, 4), 2, 200)
    for _ in range(3):
        parts = world.source.choice(GROWN)
        for part in parts:
            if part.startswith("tp"):
                world.change(world.plan(part, is_merge=True))
            act(world, world.source.randrange(60))
        world.order(*world.source.sample([Group.parse(part).leader for part in parts], 2))
        act(world, world.source.randrange(120))
        assert world.change(world.plan(WIDE, *parts, is_merge=True)) is not None
        act(world, world.source.randrange(60))
        assert world.change(world.plan(WIDE, is_merge=False)) is not None
    world.run_to_the_end()
