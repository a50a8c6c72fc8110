"""SLO-aware offloading (SelectN-like): one distance for all, as close as the SLO allows, for each new batch."""

from collections.abc import Sequence

from pengserve.planners.placement.solver import predicted_s
from pengserve.planners.placement.spread import RESIDENT, Spread
from pengserve.planners.placement.values import Decode, Machine
from pengserve.simulator.engine.offload.planner import OffloadPlanner, Placed, uniform
from pengserve.simulator.policies.offload.base import OffloadPolicy, quickest, uniform_spreads, with_spread


class SloAware(OffloadPolicy):
    """A loose SLO offloads more layers; where none is kept, the quickest distance is taken."""

    def planner(self) -> OffloadPlanner:
        """The closest distance within the SLO, for each batch."""
        return _ClosestWithin()


class _ClosestWithin:
    def __init__(self) -> None:
        self._ids, self._spread = frozenset[str](), RESIDENT

    def place(self, requests: Sequence[Decode], machine: Machine, last_step_s: float | None) -> Placed:
        ids = frozenset(request.request_id for request in requests)
        if ids != self._ids:
            self._ids, self._spread = ids, _chosen(requests, machine)
        return uniform(requests, self._spread)


def _chosen(requests: Sequence[Decode], machine: Machine) -> Spread:
    limit_s = min((r.slo_s for r in requests if r.slo_s is not None), default=float("inf"))
    for spread in reversed(uniform_spreads(machine)):  # the closest distance first
        if predicted_s(with_spread(requests, spread), machine) <= limit_s:
            return spread
    return quickest(requests, machine)
