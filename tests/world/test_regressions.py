"""Worlds that broke a law once, each shrunk to what it takes."""

from dataclasses import replace

import pytest

from tests.world.faults import Fault, Kind, Scenario
from tests.world.world import run

ONE_STREAM = Scenario(
    seed=1,
    num_instances=2,
    num_ingresses=1,
    is_elastic=False,
    lengths=(140,),
    arrivals_s=(4.0,),
    leave_s=(None,),
    poison=(),
    faults=(),
)
MANY_STREAMS = replace(ONE_STREAM, lengths=(100,) * 8, arrivals_s=(4.0,) * 8, leave_s=(None,) * 8)


def crash(at_s: float, slot: int) -> Fault:
    return Fault(at_s=at_s, kind=Kind.CRASH, target=slot)


def exception(at_s: float, point: str) -> Fault:
    return Fault(at_s=at_s, kind=Kind.EXCEPTION, point=point)


def crashes(first_s: float) -> tuple[Fault, ...]:
    """One crash of each slot, so that one of them is under any stream."""
    return crash(first_s, 0), crash(first_s + 3.0, 1)


def breaks(scenario: Scenario, *faults: Fault) -> str:
    """The law that is broken, or an empty string."""
    return run(replace(scenario, faults=tuple(sorted(faults, key=lambda fault: fault.at_s)))).broken


@pytest.mark.parametrize("point", ["events.on_resumed", "events.on_ended", "events.on_dispatched", "link.write"])
def test_an_exception_in_the_middle_of_a_batch_leaves_no_hole_in_a_stream(point: str) -> None:
    """Tokens were noted and never handed on: the stream went on without them, or its request waited for ever."""
    assert not breaks(MANY_STREAMS, exception(4.0, point), exception(5.0, point), *crashes(6.0))


def test_the_end_of_a_channel_is_taken_in_though_that_fails_at_first() -> None:
    """The requests of a link whose end was lost on the way waited for ever."""
    assert not breaks(MANY_STREAMS, exception(5.0, "ingress.on_down"), exception(5.0, "ingress.on_down"), *crashes(6.0))


@pytest.mark.parametrize("point", ["ingress.on_up", "ingress.on_batch", "ingress.on_table", "ingress.connect"])
def test_an_exception_in_a_callback_of_a_link_deafens_no_ingress(point: str) -> None:
    assert not breaks(MANY_STREAMS, exception(1.0, point), exception(5.0, point), *crashes(6.0))


def test_faults_of_an_ingress_condemn_no_request() -> None:
    """Each counted as an instance that died of the request; two were proof."""
    assert not breaks(ONE_STREAM, *(exception(4.2 + 0.3 * i, "ingress.on_batch") for i in range(2)))


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0])
def test_a_wall_clock_that_jumps_between_two_controllers_freezes_nothing(jump_s: float) -> None:
    full = Fault(at_s=1.0, kind=Kind.FULL_DISK, target=0, seconds=15.0)  # no log tells the next controller
    death = Fault(at_s=6.0, kind=Kind.CONTROLLER_DEATH, seconds=0.5)
    assert not breaks(MANY_STREAMS, full, Fault(at_s=5.0, kind=Kind.CLOCK, seconds=jump_s), death, *crashes(8.0))


def test_of_two_controllers_one_is_left_and_nothing_is_done_twice() -> None:
    second = Fault(at_s=5.0, kind=Kind.SECOND_CONTROLLER)
    slow = Fault(at_s=4.5, kind=Kind.SLOW_RAY, seconds=6.0)
    assert not breaks(MANY_STREAMS, slow, second, *crashes(5.1))


def test_a_controller_that_gave_way_takes_over_again_when_its_successor_has_died() -> None:
    """The one with the newest term was killed, and the other one, which Serve kept, had ended its loop for good."""
    second, third = (
        Fault(at_s=5.0, kind=Kind.SECOND_CONTROLLER, seconds=3.0),
        Fault(at_s=5.6, kind=Kind.SECOND_CONTROLLER, seconds=0.5),
    )
    assert not breaks(MANY_STREAMS, exception(4.9, "terms.claim"), second, third, *crashes(8.0))


def test_a_controller_comes_back_on_a_full_disk_with_a_torn_log() -> None:
    torn = Fault(at_s=6.0, kind=Kind.TORN_LINE, target=40)
    full = Fault(at_s=6.0, kind=Kind.FULL_DISK, target=30, seconds=12.0)
    short = Fault(at_s=2.0, kind=Kind.SHORT_WRITES, target=7, seconds=12.0)
    death = Fault(at_s=6.5, kind=Kind.CONTROLLER_DEATH, seconds=0.5)
    assert not breaks(MANY_STREAMS, torn, full, short, death, *crashes(8.0))


@pytest.mark.parametrize("num_ingresses", [1, 2])
@pytest.mark.parametrize("poison", [0, 9, 31])
def test_a_killer_in_busy_traffic_is_found_and_no_request_of_another_ingress_pays(
    num_ingresses: int, poison: int
) -> None:
    """It was always beside requests that had just begun: it ended up to nine lives, and others were condemned."""
    arrivals_s = tuple(4.0 + 0.1 * number for number in range(80))
    busy = replace(
        ONE_STREAM, num_ingresses=num_ingresses, lengths=(12,) * 80, arrivals_s=arrivals_s, leave_s=(None,) * 80
    )
    assert not breaks(replace(busy, poison=(poison,)))


@pytest.mark.parametrize("num_ingresses", [1, 2])
def test_a_killer_that_comes_alone_is_found(num_ingresses: int) -> None:
    assert not breaks(replace(ONE_STREAM, num_ingresses=num_ingresses, poison=(0,)))
