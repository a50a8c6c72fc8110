"""Timing steps of `dp` while an instance has nothing else to do, so that pipelines are filled evenly from the start.

It waits until the first requests were served, or none came for a while: it must not delay the first answer, nor take
processor time from instances that still load. A request that comes waits for one step at most.
"""

import contextlib
import logging
import time
from collections.abc import Callable

from pengserve.planners.cost_model import CostModel, Sample, fit
from pengserve.planners.types.errors import PengServeError, one_line
from pengserve.replicas.engine.lanes.dp_lane import DpLane
from pengserve.replicas.engine.profiling import choose_batches, profile_steps

logger = logging.getLogger(__name__)

NUM_BATCHES, NUM_STEPS = 18, 3
PATIENCE_S = 15.0  # an instance that has served no request waits so long: users may be about to send the first one


class IdleProfile:
    """The samples so far. Belongs to the thread that steps the lane."""

    def __init__(self, dp: DpLane, now: Callable[[], float] = time.monotonic) -> None:
        self._dp, self._now = dp, now
        self._batches = choose_batches(dp.device_capacity, dp.step_tokens, NUM_BATCHES, repetitions=NUM_STEPS)
        self._samples: list[Sample] = []
        self._not_before_s = now() + PATIENCE_S
        self._is_given_up = False
        self.spent_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to time."""
        return self._is_given_up or len(self._samples) == len(self._batches)

    def advance(self, is_wanted: Callable[[], bool]) -> None:
        """Times batches until all are timed or `is_wanted()`, which is asked after each step.

        The lane must be idle, and is idle again afterwards: its totals are those of before.
        """
        if self._now() < self._not_before_s and not self._dp.has_served:
            return
        started_s, totals = time.perf_counter(), self._dp.kept_totals()
        steps = profile_steps(self._dp, self._batches[len(self._samples) :], NUM_STEPS)
        try:
            with contextlib.closing(steps):
                for sample in steps:
                    if sample is not None:
                        self._samples.append(sample)
                    if is_wanted():
                        break
        except Exception as error:
            is_foreseen = isinstance(error, PengServeError)
            told = "steps could not be profiled (%s): pipelines learn what they cost as they go"
            logger.warning(told, one_line(error), exc_info=not is_foreseen)
            self._dp.abort([request.request_id for request in self._dp.requests()])
            self._is_given_up = True
        finally:
            self._dp.count_on_from(totals)
            self.spent_s += time.perf_counter() - started_s

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What was timed, once all is; empty where steps could not be timed."""
        return () if self._is_given_up else tuple(self._samples)

    def model(self) -> CostModel | None:
        """What the samples say, once all are there; None where steps could not be timed."""
        if self._is_given_up:
            return None
        try:
            model = fit(self._samples)
        except PengServeError as error:
            logger.warning("timed steps give no cost model (%s): pipelines learn what they cost as they go", error)
            return None
        logger.info("profiled %d batches in %.1f s: %s", len(self._samples), self.spent_s, model)
        return model
