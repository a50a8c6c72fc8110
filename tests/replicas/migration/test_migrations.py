"""Laws of migrations: every answer is right, no block is lost, and a migration that ends early costs no request."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from pengserve.planners.types.errors import FenceError
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.kv import pacing
from pengserve.replicas.migration import leaving
from pengserve.replicas.migration.leaving import Leaving, Phase
from tests.replicas.migration.sum_lanes import BLOCK, BLOCK_BYTES
from tests.replicas.migration.world import SumInstance, World
from tests.support.effort import is_long


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A piece is one block, so that requests decode while they are copied."""
    monkeypatch.setattr(pacing, "LEAST_BYTES", 1)
    monkeypatch.setattr(pacing, "MOST_BYTES", 1)
    yield


def cases(few: int, many: int) -> range:
    """So many, and many under `--hypothesis-profile=long`."""
    return range(many if is_long() else few)


KINDS = ("dp", "tp2", "pp2")
PAIRS = [(source, target) for source in KINDS for target in KINDS]


def begun(world: World, max_tokens: int = 150) -> World:
    """Three requests that decode at the first instance, or group."""
    world.send(3, max_tokens=max_tokens)
    world.run(lambda: all(record.tokens for record in world.ingress.records.values()))
    return world


@pytest.mark.parametrize("shapes", [*PAIRS, ("tp4", "pp2"), ("pp4", "tp2"), ("tp2", "tp4"), ("pp2", "pp4")])
@pytest.mark.parametrize("seed", cases(1, 9))
def test_requests_move_with_their_kv(seed: int, shapes: tuple[str, str]) -> None:
    world = begun(World(seed, shapes=shapes), 300)
    world.order(0, 1)
    world.run_to_the_end()
    assert world.num_migrated() == 3
    assert all(record.num_sent == 1 for record in world.ingress.records.values()), "something was recomputed"


@pytest.mark.parametrize("seed", cases(2, 18))
@pytest.mark.parametrize(
    "shapes", [("dp", "dp", "dp"), ("dp", "tp2", "pp2"), ("tp2", "tp2", "pp2"), ("pp2", "tp4", "pp2")]
)
def test_requests_move_to_and_fro(seed: int, shapes: tuple[str, ...]) -> None:
    world = begun(World(seed, (80, 80, 80), shapes), 300)
    for _ in range(6):
        for source in range(3):
            world.order(source, (source + 1) % 3)
        for _ in range(200):
            world.act()
    world.run_to_the_end()
    assert world.num_migrated() > 3


def test_it_decodes_while_it_is_copied() -> None:
    world = World(3)
    world.send(1, num_prompt=300, max_tokens=150)
    world.run(lambda: bool(world.ingress.records["r0"].tokens))
    world.order(0, 1)
    world.run(lambda: in_phase(world, Phase.COPYING))
    before = len(world.ingress.records["r0"].tokens)
    world.run(lambda: not under_way(world))
    assert len(world.ingress.records["r0"].tokens) > before + 3
    world.run_to_the_end()


@pytest.mark.parametrize("shapes", [("dp", "dp"), ("tp2", "dp"), ("pp2", "tp2")])
@pytest.mark.parametrize("seed", cases(2, 12))
def test_what_waits_without_kv_is_sent_on(seed: int, shapes: tuple[str, str]) -> None:
    world = World(seed, (24, 80), shapes)
    world.send(12, num_prompt=60, max_tokens=120)  # each of twelve blocks in the end
    world.run(lambda: world.at(0).lane.num_requests() == 12 and world.at(0).lane.num_running() > 0)
    source = world.at(0).lane
    world.run(lambda: bool(source.scheduler.waiting))
    before = [request for request in source.requests() if not request.num_computed_tokens]
    order = world.redirect(0, 1, max_tokens=200)
    world.at(0).run_commands()
    after = [request for request in source.requests() if not request.num_computed_tokens]
    gone = before[: len(before) - len(after)]
    assert gone and before[len(gone) :] == after and sum(request.num_tokens for request in gone) <= 200
    world.at(0).migrations.order([order])
    world.run_to_the_end()
    assert sum(record.num_sent for record in world.ingress.records.values()) == 12 + len(gone), "it was taken once"


def test_a_redirect_is_for_one_life_and_waits_for_no_switch() -> None:
    world = World(0, (24, 80))
    world.send(12, num_prompt=60, max_tokens=60)
    world.run(lambda: bool(world.at(0).lane.scheduler.waiting))
    world.at(0).is_switching = True
    order = world.redirect(0, 1)
    with pytest.raises(FenceError, match="is for instance"):
        world.at(1).migrations.order([order])
    world.at(0).run_commands()
    world.at(0).is_switching = False
    world.run_to_the_end()
    assert all(record.num_sent == 1 for record in world.ingress.records.values())


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that takes five blocks a step."""
    monkeypatch.setattr(pacing, "LEAST_BYTES", 5 * BLOCK_BYTES)
    monkeypatch.setattr(pacing, "MOST_BYTES", 5 * BLOCK_BYTES)


@pytest.mark.parametrize("least", (1, 8))
@pytest.mark.parametrize("seed", range(4))
def test_several_leave_at_once_as_far_as_the_link_has_bytes_for_a_few_steps(
    wide: None, monkeypatch: pytest.MonkeyPatch, seed: int, least: int
) -> None:
    monkeypatch.setattr(leaving, "LEAST_AT_ONCE", least)
    world = World(seed, (120, 120))
    world.send(8, max_tokens=150)
    world.run(lambda: all(record.tokens for record in world.ingress.records.values()))
    world.order(0, 1)
    most = 0
    while world.at(0).lane.num_requests():
        world.act()
        copied = [x for x in under_way(world) if x.phase is not Phase.HELD]
        most = max(most, len(copied))
        # Five blocks or more each: four steps of five blocks are full with at most four, and one that began before.
        assert len(copied) <= max(5, least)
    assert most >= min(8, max(2, least))
    world.run_to_the_end()
    assert world.num_migrated() >= 6, "few had ended where they were"
    assert all(record.num_sent == 1 for record in world.ingress.records.values()), "something was recomputed"


@pytest.mark.parametrize("shapes", PAIRS)
def test_of_several_that_leave_a_later_one_may_end_first(wide: None, shapes: tuple[str, str]) -> None:
    for seed in range(4):
        world = World(seed, (120, 120), shapes)
        world.send(4, max_tokens=200)
        world.run(lambda world=world: all(r.tokens for r in world.ingress.records.values()))  # type: ignore[misc]
        world.order(0, 1)
        world.run(lambda world=world: len(under_way(world)) >= 2)  # type: ignore[misc]
        for _ in range(seed * 10):
            world.act()
        if len(found := under_way(world)) >= 2:
            world.at(0).migrations._departures.give_up(found[-1], "a test calls it off")
        world.run_to_the_end()
        assert world.num_migrated() >= 2, "one that ended has taken others with it"


def test_between_two_steps_requests_stand_still_for_the_bytes_of_one_piece(wide: None) -> None:
    """Four requests whose last two blocks are due together: a piece has five blocks."""
    world = World(0, (80, 80))
    world.send(4, num_prompt=17, max_tokens=150)
    source, target = world.at(0), world.at(1)
    source.run_commands()
    source.step()
    source.step()
    world.order(0, 1)
    source.run_commands()
    assert len(under_way(world)) == 4
    world.deliver(0, 1)
    target.run_commands()
    world.deliver(1, 0)
    source.run_commands()
    assert num_held(world) == 2
    source.step()
    assert num_held(world) == 4
    world.run_to_the_end()
    assert world.num_migrated() == 4


@pytest.mark.parametrize("seed", range(6))
def test_a_short_request_may_overtake_a_long_one(wide: None, seed: int) -> None:
    world = World(seed)
    world.send(1, num_prompt=270, max_tokens=100)
    world.send(1, num_prompt=17, max_tokens=100)
    world.run(lambda: all(record.tokens for record in world.ingress.records.values()))
    for name in ("r0", "r1"):
        world.order(0, 1, request_ids=(name,))
    world.run(lambda: world.num_migrated() == 2, limit=20_000)
    world.run_to_the_end()


def test_what_moves_by_one_order_is_left_alone_by_another_that_ends(wide: None) -> None:
    world = World(0, (80, 80, 80))
    world.send(4, max_tokens=150)
    world.run(lambda: all(record.tokens for record in world.ingress.records.values()))
    world.order(0, 1, max_tokens=150, empties=True)
    world.order(0, 2, empties=True, must_leave=True)
    world.run_to_the_end()
    assert world.num_migrated() == 4
    assert all(record.num_sent == 1 for record in world.ingress.records.values()), "something was recomputed"


PHASES = (Phase.OFFERED, Phase.COPYING, Phase.COPIED, Phase.HELD)


def under_way(world: World) -> list[Leaving]:
    """What leaves the first instance."""
    return list(world.at(0).migrations._departures._leaving.values())


def num_held(world: World) -> int:
    return sum(leaving.phase is Phase.HELD for leaving in under_way(world))


def in_phase(world: World, phase: Phase) -> bool:
    return any(leaving.phase is phase for leaving in under_way(world))


def until_phase(world: World, phase: Phase) -> None:
    world.order(0, 1)
    world.run(lambda: in_phase(world, phase) or all(r.is_over for r in world.ingress.records.values()))
    assert in_phase(world, phase)


@pytest.mark.parametrize("more", (0, 3, 20))
@pytest.mark.parametrize("victim", (0, 1))
@pytest.mark.parametrize("phase", [p for p in PHASES if p is not Phase.COPIED])
def test_either_side_may_die_in_each_phase(phase: Phase, victim: int, more: int) -> None:
    world = begun(World(more))
    until_phase(world, phase)
    for _ in range(more):
        world.act()
    world.kill(victim)
    world.run_to_the_end()


@pytest.mark.parametrize("victim", ((0, 0), (0, 1), (1, 0), (1, 1)))
@pytest.mark.parametrize("phase", [p for p in PHASES if p is not Phase.COPIED])
@pytest.mark.parametrize("shapes", [("tp2", "pp2"), ("pp2", "tp2"), ("tp2", "tp2"), ("pp2", "pp2")])
def test_any_member_may_die_in_each_phase(shapes: tuple[str, str], phase: Phase, victim: tuple[int, int]) -> None:
    for more in cases(2, 9):
        world = begun(World(more, (80, 80, 80), (*shapes, "dp")), 60)
        until_phase(world, phase)
        for _ in range(more**3):
            world.act()
        world.kill(*victim)
        world.run_to_the_end()


def is_quiet(instance: SumInstance) -> bool:
    """Whether nothing of a migration is left here."""
    members = instance.migrations._members
    return not (
        instance.migrations.is_moving
        or instance.transfers._under_way
        or members.senders.names
        or members.receivers.names
    )


@pytest.mark.parametrize("side", (0, 1))
@pytest.mark.parametrize("phase", [p for p in PHASES if p is not Phase.COPIED])
@pytest.mark.parametrize("shapes", [("dp", "dp"), ("tp2", "pp2"), ("pp2", "tp2")])
def test_a_switch_wins(shapes: tuple[str, str], phase: Phase, side: int) -> None:
    """It is prepared at one member after the other, in any order."""
    for order in (1, -1):
        world = begun(World(1, shapes=shapes))
        until_phase(world, phase)
        members = [world.instances[key] for key in world.sides[side]]
        for instance in members[::order]:
            instance.migrations.give_way()
            instance.is_switching = True
            for _ in range(order % 4):
                world.act()
        assert not members[0].migrations.is_moving, "it ends at once where the leader has prepared"
        world.run(lambda members=members: all(is_quiet(instance) for instance in members))  # type: ignore[misc]
        for _ in range(50):
            world.act()
            assert not members[0].migrations.is_moving, "none begins"
        for instance in members:
            instance.is_switching = False
        world.order(0, 1)
        world.run_to_the_end()


@pytest.mark.parametrize("side", (0, 1))
@pytest.mark.parametrize("phase", [p for p in PHASES if p is not Phase.COPIED])
def test_a_lane_that_goes_on_without_migrations_keeps_nothing_of_them(phase: Phase, side: int) -> None:
    """As where a host tier ends: `dp` takes stock of all requests that it serves, and of all blocks that they hold."""
    world = begun(World(1))
    until_phase(world, phase)
    instance = world.at(side)
    instance.migrations.give_up_all("its host tier has ended")
    assert not instance.migrations.is_moving
    scheduler = instance.lanes.dp.scheduler
    served = {r.request_id for r in (*scheduler.running, *scheduler.holding, *scheduler.waiting)}
    assert {r.request_id for r in scheduler.requests()} == served, "a request is in no queue: it would never end"
    world.run_to_the_end()


def test_requests_that_share_a_prefix_share_it_where_they_come() -> None:
    for shapes in PAIRS:
        world = World(4, shapes=shapes)
        world.send(3, num_prompt=140, max_tokens=100, family="one")
        world.run(lambda world=world: all(r.tokens for r in world.ingress.records.values()))  # type: ignore[misc]
        world.order(0, 1)
        world.run(lambda world=world: world.num_migrated() == 3)  # type: ignore[misc]
        lane = world.at(1).lane
        shared = set.intersection(*(set(lane.block_ids(name)) for name in world.ingress.records))
        assert len(shared) >= 128 // lane.capacity.block_size, f"{shapes}: the prefix was copied again"
        world.run_to_the_end()


def test_requests_that_share_a_prefix_share_it_also_where_several_leave_at_once(wide: None) -> None:
    world = World(4)
    world.send(3, num_prompt=140, max_tokens=100, family="one")
    world.send(3, num_prompt=17, max_tokens=100)
    world.run(lambda: all(record.tokens for record in world.ingress.records.values()))
    world.order(0, 1)
    world.run(lambda: len(under_way(world)) == 4)  # one of the family, and the others
    world.run(lambda: world.num_migrated() == 6)
    lane = world.at(1).lane
    family = [set(lane.block_ids(f"r{index}")) for index in range(3)]
    assert len(set.intersection(*family)) >= 128 // BLOCK, "the prefix was copied again"
    world.run_to_the_end()


def test_what_the_target_has_already_is_not_sent() -> None:
    world = World(4)
    world.send(1, at=0, num_prompt=300, max_tokens=60, family="one")
    world.send(1, at=1, num_prompt=300, max_tokens=60, family="one")
    world.run(lambda: all(r.tokens for r in world.ingress.records.values()))
    world.order(0, 1)
    world.run(lambda: world.num_migrated() == 1)
    pieces = world.num_sent.get("migrate-kv", 0)
    assert pieces <= 6, f"{pieces} of {300 // BLOCK} blocks were sent again"
    world.run_to_the_end()


@pytest.mark.parametrize("phase", [p for p in PHASES if p is not Phase.COPIED])
def test_a_client_may_leave(phase: Phase) -> None:
    world = begun(World(2))
    until_phase(world, phase)
    wire_id = next(leaving for leaving in under_way(world) if leaving.phase is phase).request.request_id
    world.ingress.records[wire_id].is_over = True
    world.at(0).submit(lambda: world.at(0).abort(wire_id))
    del world.ingress.records[wire_id]
    world.run_to_the_end()


@pytest.mark.parametrize("seed", range(4))
def test_a_request_that_is_preempted_while_it_is_copied_stays(seed: int) -> None:
    """The source has room for two of its five requests: they preempt each other all the time."""
    world = World(seed, (30, 90))
    world.send(5, max_tokens=120)
    world.run(lambda: any(record.tokens for record in world.ingress.records.values()))
    while not all(record.is_over for record in world.ingress.records.values()):
        world.order(0, 1)
        for _ in range(60):
            world.act()
        world.order(1, 0)
    world.run_to_the_end()


@pytest.mark.parametrize("num_copies", [0, 1, 2])
@pytest.mark.parametrize("shapes", [("dp", "dp"), ("dp", "tp2"), ("pp2", "dp")])
def test_a_request_that_comes_may_be_aborted_where_it_comes(shapes: tuple[str, str], num_copies: int) -> None:
    """An ingress that lags behind does so: it stays at its source, and nothing is written into others' blocks."""
    world = World(num_copies, shapes=shapes)
    world.send(3, num_prompt=200, max_tokens=150)
    world.run(lambda: all(record.tokens for record in world.ingress.records.values()))
    world.order(0, 1)
    target = world.at(1)
    aborted: set[str] = set()

    def has_aborted() -> bool:
        for coming in list(target.migrations._arrivals._coming.values()):
            if coming.request is not None and coming.num_copies == num_copies and not coming.tail and not aborted:
                aborted.add(coming.request.request_id)
                target.abort(coming.request.request_id)
                assert not target.lane.knows(coming.request.request_id)
        return bool(aborted)

    world.run(has_aborted)
    world.send(4, at=1, num_prompt=150)  # they get its blocks
    world.run_to_the_end()
    assert all(record.num_sent == 1 for record in world.ingress.records.values())


@pytest.mark.parametrize("shapes", [("dp", "dp"), ("tp2", "dp"), ("dp", "pp2")])
def test_what_must_leave_is_not_what_comes(shapes: tuple[str, str]) -> None:
    """An order that empties one side of what it had leaves those alone that the other one sends meanwhile."""
    world = World(1, shapes=shapes)
    world.send(3, at=1, num_prompt=200, max_tokens=150)
    world.run(lambda: all(record.tokens for record in world.ingress.records.values()))
    world.order(1, 0)
    coming = world.at(0).migrations._arrivals._coming
    world.run(lambda: any(found.num_copies for found in coming.values()))
    world.order(0, 1, must_leave=True)
    world.send(4, num_prompt=150)  # they would get the blocks
    world.run_to_the_end()


def test_a_target_without_room_leaves_requests_where_they_are() -> None:
    world = begun(World(0, (80, 4)))
    world.order(0, 1)
    world.run_to_the_end()
    assert world.num_migrated() == 0
    assert all(record.num_sent == 1 for record in world.ingress.records.values())


def test_a_target_that_is_not_connected_to_the_ingress_is_given_nothing() -> None:
    world = begun(World(0))
    world.unserved.add(world.keys[1])
    world.order(0, 1)
    world.run_to_the_end()
    assert world.num_migrated() == 0


def test_a_target_that_says_nothing_costs_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    world = begun(World(0))
    until_phase(world, Phase.HELD)
    world.wires.clear()  # what was sent is never heard
    departures = world.at(0).migrations._departures
    departures.check_time(60.0)
    assert in_phase(world, Phase.HELD), "it waits for its answer"
    departures.check_time(0.0)
    world.at(1).migrations._arrivals.check_time(0.0)
    world.run_to_the_end()


@pytest.mark.parametrize("shape", KINDS)
def test_a_long_copy_is_no_silence(shape: str) -> None:
    world = World(3, shapes=("dp", shape))
    world.send(1, num_prompt=400, max_tokens=100)
    world.run(lambda: bool(world.ingress.records["r0"].tokens))
    world.order(0, 1)
    arrivals = world.at(1).migrations._arrivals
    world.run(lambda: any(coming.num_copies for coming in arrivals._coming.values()))
    (coming,) = arrivals._coming.values()
    coming.heard_s -= 1000.0
    before = coming.heard_s
    world.run(lambda: coming.heard_s > before)
    assert coming.num_copies == 1 and not coming.written, "a piece of the first copy is a sign of life"
    arrivals.check_time(60.0)
    assert len(arrivals) == 1
    world.run_to_the_end()
    assert world.num_migrated() == 1


def test_an_order_counts_once_and_for_one_life() -> None:
    world = begun(World(0))
    order = world.order(0, 1)
    world.run(lambda: world.num_migrated() == 3)
    world.order(1, 0)
    world.run(lambda: world.num_migrated() == 6)
    world.at(0).migrations.order([order])
    with pytest.raises(FenceError, match=r"for instance 0\.1"):
        world.at(1).migrations.order([order])
    world.run_to_the_end()
    assert world.num_migrated() == 6


def test_a_newer_order_stands_for_those_to_the_same_target_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "LEAST_AT_ONCE", 1)
    world = begun(World(0, (80, 80, 80)))
    for _ in range(5):
        world.order(0, 1)
        world.order(0, 2)
    migrations = world.at(0).migrations
    world.run(lambda: bool(migrations._known))
    assert len(migrations._orders) == 3, "one has begun, and one waits for each target"
    world.run_to_the_end()


def test_orders_name_requests_or_so_many_tokens() -> None:
    world = begun(World(0))
    world.order(0, 1, request_ids=("r1",))
    world.run(lambda: world.num_migrated() == 1)
    assert world.at(1).lane.knows("r1")
    world.order(0, 1, max_tokens=150)
    world.run_to_the_end()
    assert world.num_migrated() == 2, "the third one did not fit into 150 tokens"


def test_an_instance_that_is_emptied_sends_on_what_waits_and_takes_nothing() -> None:
    world = World(0)
    world.send(12, max_tokens=40)  # eight may run at once
    world.run(lambda: len(world.at(0).lane.scheduler.running) == 8)
    world.order(0, 1, empties=True)
    world.order(1, 0)
    world.run(lambda: world.at(0).lane.num_requests() == 0)
    assert world.at(1).lane.num_requests() > 0
    world.run_to_the_end()


def test_what_cannot_be_carried_stays_until_it_must_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    world = begun(World(0))
    monkeypatch.setattr(leaving, "can_migrate", lambda request: False)
    monkeypatch.setattr("pengserve.replicas.migration.migrations.can_migrate", lambda request: False)
    world.order(0, 1)
    for _ in range(100):
        world.act()
    assert world.at(0).lane.num_requests() == 3
    world.order(0, 1, must_leave=True)
    world.run(lambda: world.at(0).lane.num_requests() == 0)
    world.run_to_the_end()
    assert all(record.num_sent == 2 for record in world.ingress.records.values())


def piece(name: tuple[InstanceKey, int], copy: int) -> list[memoryview]:
    """A message with one row of a copy."""
    key, number = name
    parts = (b"%d %d %d" % (key.instance_id, key.incarnation, number), b"%d 0 0" % copy, bytes(BLOCK_BYTES))
    return [memoryview(bytearray(part)) for part in parts]


@pytest.mark.parametrize("shapes", [("dp", "dp", "dp"), ("tp2", "tp2", "dp"), ("pp2", "dp", "dp")])
def test_what_belongs_to_no_migration_is_dropped(shapes: tuple[str, ...]) -> None:
    world = begun(World(3, (80, 80, 80), shapes))
    world.order(0, 1)
    world.run(lambda: world.num_migrated() == 1)
    for key in world.sides[1]:
        for number in (1, 99):  # one that has ended, and one that has never been
            message = piece((world.keys[0], number), 0)
            world.instances[key].handlers["migrate-kv"](world.keys[0], "migrate-kv", message)
    world.run_to_the_end()
    assert world.num_migrated() == 3


@pytest.mark.parametrize("shape", KINDS)
def test_kv_of_one_who_is_not_in_the_source_ends_the_migration_and_no_request(shape: str) -> None:
    world = begun(World(3, (80, 80, 80), ("dp", shape, "dp")))
    until_phase(world, Phase.COPYING)
    (leaving, *_) = (found for found in under_way(world) if found.phase is Phase.COPYING)
    world.run(lambda: any(i.migrations._members.receivers.names for i in world.instances.values()))
    target = world.instances[world.sides[1][-1]]
    target.handlers["migrate-kv"](world.keys[2], "migrate-kv", piece(leaving.name, leaving.num_copies - 1))
    world.run_to_the_end()
    assert all(record.num_sent == 1 for record in world.ingress.records.values()), "something was recomputed"
