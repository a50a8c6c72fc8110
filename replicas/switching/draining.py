"""Waiting for running requests to end before a switch (Flying Serving section 5.2.1 and 5.2.2)."""

from collections.abc import Callable

from pengserve.planners.types.plans import SwitchPlan
from pengserve.planners.types.strategy import SwitchStrategy
from pengserve.replicas.engine.lanes.lane import Lane


class Draining:
    """One member's drain. New requests wait; under soft they run meanwhile where nothing else does."""

    def __init__(self, lane: Lane, plan: SwitchPlan, on_drained: Callable[[], None]) -> None:
        self.plan, self._lane, self._on_drained = plan, lane, on_drained
        self._left = {request.request_id for request in lane.carriable() if not lane.is_parked(request)}
        self._kept = frozenset(self._left)
        self._is_over = False
        lane.pause_new(True)

    def check(self) -> None:
        """After each step: whether all that ran has ended."""
        if self._is_over:
            return
        self._left = {request_id for request_id in self._left if self._lane.knows(request_id)}
        if not self._left:
            self._is_over = True
            if self.plan.strategy is SwitchStrategy.SOFT:
                self._lane.pause_new(False)
            self._on_drained()

    def end(self) -> frozenset[str]:
        """The switch happens, or is called off: new requests begin again. The ids that ran when it was asked for."""
        self._lane.pause_new(False)
        return self._kept
