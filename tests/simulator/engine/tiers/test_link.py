"""Laws of the link between device and host in virtual time."""

import numpy as np

from pengserve.replicas.kv.copies import Copy, Priority
from pengserve.simulator.engine.tiers.link import VirtualLink


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def copy(count: int, priority: Priority, *, to_host: bool = False) -> Copy:
    some = np.arange(count)
    return Copy(priority, 0, some, some, some, to_host=to_host)


def link() -> tuple[VirtualLink, Clock]:
    clock = Clock()
    return VirtualLink(10, 100.0, clock), clock  # ten blocks a second


def test_a_copy_takes_its_bytes_time_and_no_longer() -> None:
    way, clock = link()
    one = way.submit(copy(5, Priority.BRING))
    clock.now_s = 0.4
    assert way.finished() == []
    clock.now_s = 0.5
    assert way.finished() == [one]
    assert way.moved_bytes[False, Priority.BRING] == 50


def test_the_urgent_goes_first_and_the_other_goes_on_where_it_was() -> None:
    way, clock = link()
    slow = way.submit(copy(10, Priority.BEHIND))
    clock.now_s = 0.3
    fast = way.submit(copy(2, Priority.BRING))
    way.wait(fast)
    assert abs(way.now_s - 0.5) < 1e-9
    way.wait(slow)
    assert abs(way.now_s - 1.2) < 1e-9


def test_both_ways_go_at_once() -> None:
    way, _ = link()
    there, back = way.submit(copy(10, Priority.EVICT, to_host=True)), way.submit(copy(10, Priority.BRING))
    way.wait(there)
    way.wait(back)
    assert abs(way.now_s - 1.0) < 1e-9


def test_what_is_staged_delays_what_is_brought() -> None:
    way, _ = link()
    staged, brought = way.submit(copy(4, Priority.STAGE)), way.submit(copy(2, Priority.BRING))
    way.take_staged([staged])
    assert staged.done.is_set()
    way.wait(brought)
    assert abs(way.now_s - 0.6) < 1e-9


def test_a_cancelled_copy_counts_what_it_moved() -> None:
    way, clock = link()
    one = way.submit(copy(10, Priority.BEHIND, to_host=True))
    clock.now_s = 0.25
    way.cancel(one)
    assert one.is_cancelled
    assert way.finished() == [one]
    assert way.moved_bytes[True, Priority.BEHIND] == 25
    assert way.next_end_s() is None
