"""One switch under way at its leader: which members have drained and met, and which call waits for its end."""

import time
from collections.abc import Iterable
from concurrent.futures import Future

from pengserve.planners.types.ids import InstanceKey
from pengserve.planners.types.plans import SwitchPlan, SwitchReport
from pengserve.replicas.switching.messages import Met


class Switch:
    """Belongs to the step thread, but for `outcome`."""

    def __init__(self, plan: SwitchPlan, own: tuple[InstanceKey, ...]) -> None:
        """`own` are the members that the leader leads already: of its part, or of the group that ends."""
        self.plan, self.own = plan, own
        self.outcome: Future[SwitchReport] = Future()
        self.met: dict[InstanceKey, Met] = {}
        self.drained: set[InstanceKey] = set()
        self.started_s = time.perf_counter()  # from the meeting on: when that began
        self.drain_s = 0.0
        self.is_meeting = False
        self.has_told_own = False  # to meet

    @property
    def part_leaders(self) -> tuple[InstanceKey, ...]:
        """Who leads the other parts. Each lets its part drain and stop."""
        leaders = (self.plan.keys(part)[0] for part in self.plan.parts)
        return tuple(key for key in leaders if key != self.plan.leader and key not in self.own)

    @property
    def others(self) -> tuple[InstanceKey, ...]:
        """All members of the other parts."""
        return tuple(key for key in self.plan.members[1:] if key not in self.own)

    def have_met(self, keys: Iterable[InstanceKey]) -> bool:
        """Whether all of these have stopped at a step boundary."""
        return all(key in self.met for key in keys)

    def meet(self) -> None:
        """The drain is over: from here on the meeting is timed."""
        now_s = time.perf_counter()
        self.is_meeting, self.drain_s, self.started_s = True, now_s - self.started_s, now_s
