"""A commit under way at the leader: which members have drained and met, and which call waits for its end."""

import time
from collections.abc import Iterable
from concurrent.futures import Future

from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.layout import GroupKind
from pengserve.planners.types.plans import SwitchPlan, SwitchReport, SwitchStrategy
from pengserve.replicas.switching.messages import SwitchMessage


class Commit:
    """Belongs to the step thread, but for `outcome`."""

    def __init__(self, plan: SwitchPlan) -> None:
        self.plan = plan
        self.outcome: Future[SwitchReport] = Future()
        self.met: dict[InstanceKey, SwitchMessage] = {}
        self.drained: set[InstanceKey] = set()
        self.started_s = time.perf_counter()
        self.drain_s = 0.0
        self.is_meeting = False
        self.has_told_own = False  # the followers of the pipeline that the leader ran before

    def have_met(self, keys: Iterable[InstanceKey]) -> bool:
        """Whether all of these have stopped at a step boundary."""
        return all(key in self.met for key in keys)


def is_restore(plan: SwitchPlan) -> bool:
    """Whether weights come back beside the steps before the members meet."""
    return plan.group.kind is GroupKind.PP and not plan.is_merge


def drains(plan: SwitchPlan) -> bool:
    """Whether running requests end before the members meet."""
    waits = (SwitchStrategy.SEQUENTIAL, SwitchStrategy.SOFT) if plan.is_merge else (SwitchStrategy.SEQUENTIAL,)
    return plan.strategy in waits
