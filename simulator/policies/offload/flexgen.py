"""FlexGen-like: one distance for all requests, chosen beforehand for the largest batch; FlexGen+ follows the batch.

Neither looks at SLOs, nor at how requests grow between two changes.
"""

from collections.abc import Sequence

from pydantic import Field

from pengserve.planners.placement.spread import RESIDENT, Spread
from pengserve.planners.placement.values import Decode, Machine
from pengserve.simulator.engine.offload.planner import OffloadPlanner, Placed, uniform
from pengserve.simulator.policies.offload.base import OffloadPolicy, widest


class FlexGen(OffloadPolicy):
    """`peak_tokens`: of the largest batch, for which the distance is chosen. `is_plus`: FlexGen+."""

    peak_tokens: int = Field(default=24_576, ge=1)
    is_plus: bool = False
    horizon: int = Field(default=256, ge=0)  # steps that FlexGen+ leaves room for

    def planner(self) -> OffloadPlanner:
        """One distance for ever, or (FlexGen+) one for each batch."""
        return _ByBatch(self.horizon) if self.is_plus else _Static(self.peak_tokens)


class _Static:
    def __init__(self, peak_tokens: int) -> None:
        self._peak_tokens = peak_tokens

    def place(self, requests: Sequence[Decode], machine: Machine, last_step_s: float | None) -> Placed:
        return uniform(requests, widest([Decode(request_id="peak", num_tokens=self._peak_tokens)], machine))


class _ByBatch:
    def __init__(self, horizon: int) -> None:
        self._horizon, self._ids, self._spread = horizon, frozenset[str](), RESIDENT

    def place(self, requests: Sequence[Decode], machine: Machine, last_step_s: float | None) -> Placed:
        ids = frozenset(request.request_id for request in requests)
        if ids != self._ids:
            self._ids, self._spread = ids, self._chosen(requests, machine)
        return uniform(requests, self._spread)

    def _chosen(self, requests: Sequence[Decode], machine: Machine) -> Spread:
        return widest(requests, machine, self._horizon)
