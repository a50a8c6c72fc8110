"""A pipeline lane in virtual time, with a microbatch in flight for each stage, or fewer (KunServe 4.3, Fig. 10).

    stage 0   |-- a --|-- b --|       |-- a' --|
    stage 1           |-- a --|-- b --|        |-- a' --|
                      ^ a's activations are there        ^ a's next token is there

A microbatch enters a stage when it has left the one before, its activations have arrived and the stage has no other.
Every stage takes its share of what the microbatch costs on the whole model. Chunks of one prompt may follow each other
at once; a decode enters when its token has come back, which the scheduler sees to.
"""

from collections.abc import Callable, Sequence

from pengserve.planners.types.errors import PlanError
from pengserve.simulator.engine.gaps import GapCounter
from pengserve.simulator.engine.lane import MANY, Flight, SimLane, count_work
from pengserve.simulator.engine.scheduler import LaneScheduler
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import Batch, StepTimes


class Stages:
    """When the stages of a pipeline are free, and how long they stood idle while there was work."""

    def __init__(self, num_stages: int) -> None:
        self._free_s = [0.0] * num_stages
        self._is_empty = True  # nothing has entered since there was no work at all
        self.busy_s = self.idle_s = 0.0  # of all stages together
        self.queued_busy_s = self.queued_idle_s = 0.0  # ... of microbatches that entered while requests waited

    def enter(self, ready_s: float, stage_s: float, transfer_s: float, is_queue: bool) -> float:
        """Sends a microbatch through; when it leaves the last stage.

        Args:
            stage_s: seconds in each stage.
            transfer_s: seconds until its activations are at the next stage.
            is_queue: whether requests wait that are in no microbatch.
        """
        now_s, idle_s = ready_s, 0.0
        for stage, free_s in enumerate(self._free_s):
            start_s = max(now_s, free_s)
            idle_s += start_s - free_s
            self._free_s[stage] = start_s + stage_s
            now_s = start_s + stage_s + transfer_s
        if self._is_empty:  # filling an empty pipeline is no bubble
            idle_s, self._is_empty = 0.0, False
        self._count(idle_s, stage_s * len(self._free_s), is_queue)
        return now_s - transfer_s

    def drain(self) -> None:
        """There is no work any more: until there is some, stages stand idle for a reason."""
        self._is_empty = True

    def bubble(self) -> float:
        """Share of the stages' time, while there was work and after the first microbatch, that they stood idle."""
        return _share(self.idle_s, self.busy_s)

    def queued_bubble(self) -> float:
        """The same before microbatches that entered while requests waited: what formation can do something about."""
        return _share(self.queued_idle_s, self.queued_busy_s)

    def _count(self, idle_s: float, busy_s: float, is_queue: bool) -> None:
        self.idle_s += idle_s
        self.busy_s += busy_s
        if is_queue:
            self.queued_idle_s += idle_s
            self.queued_busy_s += busy_s


class PipelineLane(SimLane):
    """As `SimLane`, over `scheduler.options.num_stages` stages. Its scheduler forms the microbatches."""

    def __init__(
        self,
        scheduler: LaneScheduler,
        times: StepTimes,
        *,
        on_end: Callable[[Sequence[LiveRequest]], None],
        transfer_s: Callable[[Batch], float],
        stage_times: StepTimes | None = None,
        pace: float = 1.0,
        on_step: Callable[[], None] | None = None,
        gaps: GapCounter | None = None,
        swap_s: Callable[[int, int], float] | None = None,
    ) -> None:
        """A lane without requests.

        Args:
            times: of the whole model.
            stage_times: of one stage; None: even shares of the whole.
            pace: factor on what a stage takes, where it has more of a processor than when steps were timed.
            transfer_s: seconds in which a microbatch's activations go from one stage to the next.

        Raises:
            PlanError: the scheduler is not set to two stages or more.
        """
        self.num_stages = scheduler.options.num_stages
        if self.num_stages < 2:
            raise PlanError("a pipeline lane needs a scheduler with num_stages of 2 or more: use a plain lane")
        super().__init__(scheduler, times, on_end=on_end, on_step=on_step, gaps=gaps, swap_s=swap_s)
        self.stages = Stages(self.num_stages)
        self._transfer_s, self._stage_times, self._pace = transfer_s, stage_times, pace

    def _stage_s(self, batch: Batch) -> float:
        if self._stage_times is not None:
            return self._pace * self._stage_times.step_s(batch)
        return self._pace * self.times.step_s(batch) / self.num_stages

    def _count_work(self, batch: Batch, seconds: float, num_steps: int) -> None:
        """Nothing: a microbatch is counted as it enters: what its stages take, and idle time of a full pipeline."""

    def _wake(self) -> None:
        if not self._is_at_boundary:
            self._fill(self._loop.time())

    def _fill(self, now_s: float, max_steps: int = MANY) -> None:
        if self._is_paused or self._must_wait(now_s):
            return
        while len(self._flights) < self.scheduler.options.most_in_flight:
            step = self._next_step()
            if step is None:
                break
            begin_s = self._started(step, now_s)
            stage_s = self._stage_s(step.batch)
            is_queue = self.scheduler.queued_tokens > 0
            busy_s, idle_s = self.stages.busy_s, self.stages.idle_s
            end_s = self.stages.enter(begin_s, stage_s, self._transfer_s(step.batch), is_queue)
            is_full = len(self._flights) + 1 >= self.scheduler.options.most_in_flight
            idle_s = self.stages.idle_s - idle_s if is_full else 0.0  # with fewer, stages wait for work
            count_work(self.work, step.batch, self.stages.busy_s - busy_s + idle_s)
            self._flights.append(Flight(step, begin_s, 1, end_s))
            self._loop.call_at(end_s, self._ended)
        if not self._flights:
            self.stages.drain()


def _share(idle_s: float, busy_s: float) -> float:
    return idle_s / (idle_s + busy_s) if idle_s > 0 else 0.0
