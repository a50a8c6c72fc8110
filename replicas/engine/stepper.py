"""Which lane of an instance runs, its steps, and what goes on beside them.

    DP         the instance's own engine
    LEADING    a group's lane whose scheduler is here; `dp` requests wait, where a switch left some
    FOLLOWING  a group's lane that another instance schedules: steps come as messages, there is no work of one's own

A piece of a transfer is sent beside each step, in every shape.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from pengserve.planners.types.errors import PengServeError
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.engine.groups.group_lane import GroupLane
from pengserve.replicas.engine.groups.group_run import GroupRun
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.lanes.lane import Lane
from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs
from pengserve.replicas.kv.transfers import Transfers

logger = logging.getLogger(__name__)

NO_OUTPUTS: Mapping[int, EngineCoreOutputs] = MappingProxyType({})
FIRST_STEP_S = 0.005


class Stepper:
    """Belongs to the step thread. `on_broken` is called where the group that runs cannot go on."""

    def __init__(self, dp: DpLane, transfers: Transfers, on_broken: Callable[[BaseException], None]) -> None:
        self._dp, self._transfers, self._on_broken = dp, transfers, on_broken
        self.running: GroupLane | None = None  # None: dp
        self.needs_boundaries: Callable[[], bool] = lambda: False  # something goes on that acts between two steps
        self._is_leading = False
        self._step_s = FIRST_STEP_S  # of the newest step of a group, or of `dp` beside a transfer

    @property
    def current(self) -> Lane:
        """The lane that takes requests here."""
        return self.running if self.running is not None and self._is_leading else self._dp

    @property
    def is_following(self) -> bool:
        """Whether another instance schedules what runs here."""
        return self.running is not None and not self._is_leading

    def enter(self, lane: GroupLane, run: GroupRun) -> None:
        """From the next step on, `lane` runs. Requests that are still in `dp` wait there."""
        self.running, self._is_leading = lane, lane.rank == 0
        lane.enter(run)

    def leave(self) -> None:
        """From the next step on, `dp` runs. Transfers of the lane that ran are cancelled."""
        lane, self.running = self.running, None
        assert lane is not None
        self._transfers.cancel_of(lane.name)
        lane.leave()

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self._transfers.is_busy or self._can_step()

    def _can_step(self) -> bool:
        return not self.is_following and self.current.has_work()

    def step(self) -> Mapping[int, EngineCoreOutputs]:
        """One step of the lane that runs. A group that breaks costs its requests their KV, never the instance."""
        if self.running is None:
            if self._transfers.is_busy:
                return self._step_and_transfer(self._dp)
            return self._dp.step() if self.needs_boundaries() else self._dp.step_ahead()
        try:
            return self._step_and_transfer(self.running)
        except Exception as error:
            self._break(error)
            return NO_OUTPUTS

    def _step_and_transfer(self, lane: Lane) -> Mapping[int, EngineCoreOutputs]:
        """A step, and a piece of what is sent beside it, of about the same length."""
        outputs = NO_OUTPUTS
        if self._can_step():
            started_s = time.perf_counter()
            outputs = lane.step()
            self._step_s = time.perf_counter() - started_s
        if self._transfers.is_busy:
            self._transfers.advance(self._step_s)
        return outputs

    def follow(self, parts: Sequence[Buffer]) -> None:
        """Executes a step of the leader's."""
        assert self.running is not None
        started_s = time.perf_counter()
        try:
            self.running.follow(parts)
            self._step_s = time.perf_counter() - started_s
        except Exception as error:
            self._break(error)

    def break_off(self, error: Exception) -> None:
        """The group that runs is left at once, between two steps."""
        self._on_broken(error)

    def _break(self, error: Exception) -> None:
        """An error in a group's lane leaves the `dp` lane whole, so the instance does not die of it."""
        if not isinstance(error, PengServeError):
            logger.exception("a step of %s failed", self.running.name if self.running else "dp")
        self._on_broken(error)
