"""Laws of the step loop: commands run in order between steps, an idle lane is not stepped, a failure is told once."""

import threading
import time
from collections.abc import Callable, Mapping

from pengserve.planners.types.snapshot import InstanceStats, KvCapacity
from pengserve.replicas.step_loop import StepLoop

WAIT_S = 60.0


class CountingLane:
    """A lane whose work is a number of steps."""

    capacity = KvCapacity(
        num_blocks=1, block_size=1, bytes_per_block=1, max_model_len=1, max_num_seqs=1, weight_bytes=0
    )

    def __init__(self) -> None:
        self.left = self.steps = 0
        self.under_way = 0  # steps that were begun ahead
        self.closed, self.idle_begun = threading.Event(), threading.Event()
        self.idle_ended = False
        self.fails = False
        self.may_close = threading.Event()
        self.may_close.set()

    def has_work(self) -> bool:
        return self.left > 0

    def step(self) -> Mapping[int, object]:
        if self.fails:
            raise RuntimeError("the device is gone")
        self.left -= 1
        self.steps += 1
        return {}

    def end_step(self) -> Mapping[int, object] | None:
        if not self.under_way:
            return None
        self.under_way -= 1
        self.steps += 1
        return {}

    def use_idle_time(self, is_wanted: Callable[[], bool]) -> None:
        self.idle_begun.set()
        while not is_wanted():
            time.sleep(0.001)
        self.idle_ended = True

    def stats(self, last_step_s: float = 0.0) -> InstanceStats:
        return InstanceStats(step=self.steps, last_step_s=last_step_s)

    def close(self) -> None:
        assert self.may_close.wait(WAIT_S)
        self.closed.set()


class Harness:
    def __init__(self) -> None:
        self.lane = CountingLane()
        self.ready, self.idle = threading.Event(), threading.Event()
        self.seen: list[int] = []
        self.errors: list[BaseException] = []
        self.loop = StepLoop(
            build=lambda: self.lane,
            on_ready=lambda _: self.ready.set(),
            on_step=self.on_step,
            on_failed=self.on_failed,
        )
        self.loop.start()
        assert self.ready.wait(WAIT_S)

    def on_step(self, outputs: Mapping[int, object], stats: InstanceStats) -> None:
        self.seen.append(stats.step)
        if not self.lane.left:
            self.idle.set()

    def on_failed(self, error: BaseException) -> None:
        self.errors.append(error)
        self.idle.set()

    def work(self, steps: int) -> None:
        def command() -> None:
            self.lane.left += steps

        self.loop.submit(command)


def test_all_work_is_stepped_and_nothing_more() -> None:
    harness = Harness()
    harness.work(3)
    assert harness.idle.wait(WAIT_S)
    harness.idle.clear()
    harness.work(2)
    assert harness.idle.wait(WAIT_S)
    assert harness.loop.stop(WAIT_S)
    assert harness.seen == [1, 2, 3, 4, 5]
    assert harness.lane.closed.is_set()


def test_commands_run_in_order_in_one_thread() -> None:
    harness = Harness()
    order: list[tuple[int, str]] = []
    for i in range(50):
        harness.loop.submit(lambda i=i: order.append((i, threading.current_thread().name)))
    harness.work(1)
    assert harness.idle.wait(WAIT_S)
    assert harness.loop.stop(WAIT_S)
    assert order == [(i, "step-loop") for i in range(50)]


def test_failure_is_told_once_and_the_lane_closed() -> None:
    harness = Harness()
    harness.lane.fails = True
    harness.work(5)
    assert harness.idle.wait(WAIT_S)
    assert harness.loop.stop(WAIT_S)
    assert [str(error) for error in harness.errors] == ["the device is gone"]
    assert harness.lane.closed.is_set()


def test_idle_time_is_used_and_given_up_for_a_command() -> None:
    harness = Harness()
    assert harness.lane.idle_begun.wait(WAIT_S)
    done = threading.Event()
    harness.loop.submit(lambda: (setattr(harness.lane, "left", 2), done.set()))
    assert done.wait(WAIT_S) and harness.lane.idle_ended
    assert harness.idle.wait(WAIT_S) and harness.lane.steps == 2
    assert harness.loop.stop(WAIT_S)


def test_a_failure_is_told_before_the_lane_is_closed() -> None:
    """To close may take long, or for ever: an engine waits for its workers. Requests must go on elsewhere meanwhile."""
    harness = Harness()
    harness.lane.may_close.clear()
    harness.lane.fails = True
    harness.work(1)
    assert harness.idle.wait(WAIT_S)
    assert len(harness.errors) == 1 and not harness.lane.closed.is_set()
    harness.lane.may_close.set()
    assert harness.loop.stop(WAIT_S)
    assert harness.lane.closed.is_set() and len(harness.errors) == 1


def test_a_command_between_steps_waits_for_those_under_way_and_one_beside_them_does_not() -> None:
    harness = Harness()
    lane, seen, done = harness.lane, [], threading.Event()

    def begin_ahead() -> None:
        lane.under_way = 2

    def note() -> None:
        seen.append((lane.under_way, len(harness.seen)))

    harness.loop.submit_beside(begin_ahead)
    harness.loop.submit_beside(note)
    harness.loop.submit(note)
    harness.loop.submit_beside(done.set)
    assert done.wait(WAIT_S)
    assert harness.loop.stop(WAIT_S)
    assert seen == [(2, 0), (0, 2)]  # and both steps were told before
