"""Notices a step loop that hangs: heartbeats come from other threads, so the instance would look healthy for ever."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from pengserve.planners.types.snapshot import InstanceStats
from pengserve.replicas.step_loop import StepLoop

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
# Of the longest recent step. On a machine with other load a step can take several times as long.
TIMES_THE_LONGEST = 20.0
# Even where recent steps were short. Longer than all time-outs of a switch's commands, which run in the same thread.
LEAST_S = 90.0
FIRST_STEPS, FIRST_S = 20, 600.0  # the first steps compile kernels and touch pages for the first time


class StepWatch:
    """A thread beside the step loop's. Calls `on_stuck` once, with a sentence, when that hangs."""

    def __init__(self, loop: StepLoop, on_stuck: Callable[[str], None], period_s: float = PERIOD_S) -> None:
        self._loop, self._on_stuck, self._period_s = loop, on_stuck, period_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="step-watch", daemon=True)

    def start(self) -> None:
        """Begins to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the watch."""
        self._over.set()

    def aged(self, stats: InstanceStats) -> InstanceStats:
        """`stats` with the age of the step under way, where that has lasted longer than `PERIOD_S`."""
        stalled_s = self._loop.stalled_s
        return replace(stats, step_age_s=stalled_s, step_limit_s=self.limit_s()) if stalled_s > PERIOD_S else stats

    def limit_s(self) -> float:
        """For how long the loop may stand still now."""
        if self._loop.num_steps < FIRST_STEPS:
            return FIRST_S
        return max(LEAST_S, TIMES_THE_LONGEST * self._loop.longest_s)

    def _run(self) -> None:
        while not self._over.wait(self._period_s):
            stalled_s = self._loop.stalled_s
            if stalled_s > self.limit_s():
                why = f"a step hangs for {stalled_s:.0f} s; the longest recent step took {self._loop.longest_s:.2g} s"
                logger.error("%s; the instance gives up", why)
                self._on_stuck(why)
                return
