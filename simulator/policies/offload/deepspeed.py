"""DeepSpeed-Inference-like: all KV is on the host, and the next layer's comes while a layer is computed."""

from collections.abc import Sequence

from pengserve.planners.placement.spread import AWAY
from pengserve.planners.placement.values import Decode, Machine
from pengserve.simulator.engine.offload.planner import OffloadPlanner, Placed, uniform
from pengserve.simulator.policies.offload.base import OffloadPolicy


class DeepSpeed(OffloadPolicy):
    """All layers away, always."""

    def planner(self) -> OffloadPlanner:
        """Keeps all layers away, always."""
        return _AllAway()


class _AllAway:
    def place(self, requests: Sequence[Decode], machine: Machine, last_step_s: float | None) -> Placed:
        return uniform(requests, AWAY)
