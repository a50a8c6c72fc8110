"""The step loop: one thread that builds a lane, feeds it and steps it. It never waits for a client to read tokens."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from pengserve.planners.types.snapshot import InstanceStats, KvCapacity

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
FORGET_A_STEP = 0.5**0.01


class SteppedLane(Protocol):
    """What the loop needs of a lane. Called in the loop's thread only."""

    capacity: KvCapacity

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""

    def step(self) -> Mapping[int, Any]:
        """One engine step; outputs by client index. The next one may be under way when it returns."""

    def end_step(self) -> Mapping[int, Any] | None:
        """Ends the oldest step that is under way; its outputs, or None where there is none."""

    def use_idle_time(self, is_wanted: Callable[[], bool]) -> None:
        """Work that can wait until there is nothing else to do; to be ended soon after `is_wanted()`."""

    def stats(self, last_step_s: float = 0.0) -> InstanceStats:
        """Load after the last step."""

    def close(self) -> None:
        """Frees everything."""


Lane = TypeVar("Lane", bound=SteppedLane)


class _Command(NamedTuple):
    run: Callable[[], object]
    is_beside_steps: bool


class StepLoop(Generic[Lane]):
    """Owns the thread. Other threads reach the lane through `submit` and `submit_beside` alone.

    Consumes: submitted commands.   Produces: `on_step(outputs, stats)` after each step.
    Waits for: a command, while there is no work.   Unblocked by: `submit`, `stop`.
    """

    def __init__(
        self,
        *,
        build: Callable[[], Lane],
        on_ready: Callable[[Lane], None],
        on_step: Callable[[Mapping[int, Any], InstanceStats], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._build, self._on_ready, self._on_step, self._on_failed = build, on_ready, on_step, on_failed
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)
        self._stopping = False
        self._is_busy = False
        self._moved_s = time.monotonic()  # when the loop last came on
        self.num_steps = 0
        self.longest_s = 0.0  # of the steps of late: it halves within a hundred steps that take less

    @property
    def stalled_s(self) -> float:
        """For how long the loop has not come on though it has something to do; else 0.0. From any thread."""
        has_to = self._is_busy or not self._commands.empty()
        return max(0.0, time.monotonic() - self._moved_s) if has_to else 0.0

    def excuse(self, allowed_s: float) -> None:
        """In the loop's thread: what runs now may take so long, and counts as standing still only from then on."""
        self._moved_s = time.monotonic() + allowed_s

    def start(self) -> None:
        """Begins to build the lane; `on_ready` or `on_failed` tells how it went."""
        self._thread.start()

    def submit(self, command: Callable[[], object]) -> None:
        """Runs `command` in the loop's thread between two steps. From any thread; returns at once."""
        self._commands.put(_Command(command, is_beside_steps=False))

    def submit_beside(self, command: Callable[[], object]) -> None:
        """As `submit`, for what may also happen while a step is under way: requests that come, go or are reordered."""
        self._commands.put(_Command(command, is_beside_steps=True))

    def stop(self, timeout_s: float) -> bool:
        """Ends the loop after the step it is in; False where that took longer than `timeout_s`."""
        self._stopping = True
        self._commands.put(None)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            lane = self._build()
            try:
                self._on_ready(lane)
                while not self._stopping:
                    has_work = lane.has_work()
                    if self._drain_commands(lane, wait=not has_work):
                        has_work = lane.has_work()
                    elif not has_work:
                        lane.use_idle_time(self._is_called)
                    if has_work:
                        self._step(lane, lane.step)
            except Exception as error:
                self._tell(error)  # before what may take long, or for ever: its requests have to go on elsewhere
            finally:
                lane.close()
        except Exception as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        logger.error("the step loop failed", exc_info=error)
        self._on_failed(error)

    def _step(self, lane: Lane, end: Callable[[], Mapping[int, Any] | None]) -> bool:
        """Tells the outputs of a step; False where there was none."""
        self._moved_s, self._is_busy = time.monotonic(), True
        started_s = time.perf_counter()
        outputs = end()
        took_s = time.perf_counter() - started_s
        self._is_busy = False
        if outputs is None:
            return False
        self.num_steps += 1
        self.longest_s = max(took_s, self.longest_s * FORGET_A_STEP)
        self._on_step(outputs, lane.stats(took_s))
        return True

    def _is_called(self) -> bool:
        self._moved_s = time.monotonic()
        return not self._commands.empty()

    def _drain_commands(self, lane: Lane, *, wait: bool) -> bool:
        """Runs the commands that are there, or come within `IDLE_WAIT_S`; whether there was any."""
        was_any = False
        self._moved_s = time.monotonic()
        try:
            command = self._commands.get(timeout=IDLE_WAIT_S) if wait else self._commands.get_nowait()
            while True:
                was_any = True
                if command is not None:
                    if not command.is_beside_steps:
                        while self._step(lane, lane.end_step):
                            pass
                    self._is_busy = True
                    command.run()
                    self._is_busy = False
                self._moved_s = time.monotonic()
                command = self._commands.get_nowait()
        except queue.Empty:
            return was_any
