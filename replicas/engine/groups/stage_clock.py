"""How long this instance's stage of a pipeline computes, and how long it stands idle between two microbatches.

    begin -- busy --> end -- idle --> begin -- busy --> end        begin (is_first) -- busy --> end
                                                           no work

Idle is what KunServe calls a bubble (section 4.3): all time between microbatches while the pipeline has work. It
includes the member's other work: scheduling, encoding messages, sending tokens and KV.
"""

import time
from collections.abc import Callable


class StageClock:
    """Two totals that only grow. The step thread writes; any thread may read them."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self.busy_s = 0.0
        self.idle_s = 0.0
        self._now_s = now_s
        self._begun_s = 0.0
        self._ended_s: float | None = None  # of the microbatch before, while the pipeline has work

    def begin(self, *, is_first: bool) -> None:
        """A microbatch begins to compute. `is_first`: the pipeline had no work before it, so the gap is not idle."""
        self._begun_s = self._now_s()
        if self._ended_s is not None and not is_first:
            self.idle_s += self._begun_s - self._ended_s

    def end(self) -> float:
        """It has computed; how long that took."""
        self._ended_s = self._now_s()
        took_s = self._ended_s - self._begun_s
        self.busy_s += took_s
        return took_s

    def forget(self) -> None:
        """The next microbatch is of another pipeline."""
        self._ended_s = None
