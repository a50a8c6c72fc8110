"""Laws of migrations: every answer is right, no block is lost, and a migration that ends early costs no request."""

from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from pengserve.planners.types.errors import FenceError
from pengserve.replicas.kv import pacing
from pengserve.replicas.migration import leaving
from pengserve.replicas.migration.leaving import Phase
from tests.replicas.migration.sum_lanes import BLOCK
from tests.replicas.migration.world import World


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A piece is one block, so that requests decode while they are copied."""
    monkeypatch.setattr(pacing, "LEAST_BYTES", 1)
    monkeypatch.setattr(pacing, "MOST_BYTES", 1)
    yield


KINDS = ("dp", "tp2", "pp2")
PAIRS = [(source, target) for source in KINDS for target in KINDS]


def begun(world: World, max_tokens: int = 150) -> World:
    """Three requests that decode at the first instance, or group."""
    world.send(3, max_tokens=max_tokens)
    world.run(lambda: all(record.tokens for record in world.ingress.records.values()))
    return world


@pytest.mark.parametrize("shapes", [*PAIRS, ("tp4", "pp2"), ("pp4", "tp2"), ("tp2", "tp4"), ("pp2", "pp4")])
@pytest.mark.parametrize("seed", range(3))
def test_requests_move_with_their_kv(seed: int, shapes: tuple[str, str]) -> None:
    world = begun(World(seed, shapes=shapes), 300)
    world.order(0, 1)
    world.run_to_the_end()
    assert world.num_migrated() == 3
    assert all(record.num_sent == 1 for record in world.ingress.records.values()), "something was recomputed"


@pytest.mark.parametrize("seed", range(6))
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
    departures = world.at(0).migrations._departures
    world.run(lambda: departures.current is not None and departures.current.phase is Phase.COPYING)
    before = len(world.ingress.records["r0"].tokens)
    world.run(lambda: departures.current is None)
    assert len(world.ingress.records["r0"].tokens) > before + 3
    world.run_to_the_end()


PHASES = (Phase.OFFERED, Phase.COPYING, Phase.COPIED, Phase.HELD)


def in_phase(world: World, phase: Phase) -> bool:
    current = world.at(0).migrations._departures.current
    return current is not None and current.phase is phase


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
    for more in (0, 4, 11, 25):
        world = begun(World(more, (80, 80, 80), (*shapes, "dp")), 60)
        until_phase(world, phase)
        for _ in range(more):
            world.act()
        world.kill(*victim)
        world.run_to_the_end()


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
        for _ in range(50):
            world.act()
        for instance in members:
            assert instance.migrations._departures.current is None and not len(instance.migrations._arrivals)
            assert not instance.transfers._under_way and not instance.migrations._members.senders.names
            instance.is_switching = False
        world.order(0, 1)
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
    current = world.at(0).migrations._departures.current
    assert current is not None
    wire_id = current.request.request_id
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
    assert departures.current is not None, "it waits for its answer"
    departures.check_time(0.0)
    world.at(1).migrations._arrivals.check_time(0.0)
    world.run_to_the_end()


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
