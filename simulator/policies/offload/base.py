"""What the offloading policies share."""

from abc import abstractmethod
from collections.abc import Sequence

from pengserve.planners.placement.solver import predicted_s
from pengserve.planners.placement.spread import RESIDENT, Spread, distances
from pengserve.planners.placement.values import Decode, Machine
from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.engine.offload.planner import OffloadPlanner
from pengserve.simulator.policies.policy import Facts, Policy, Setup


class OffloadPolicy(Policy):
    """Every instance alone, with small batches whose layers are spread over device and host."""

    @abstractmethod
    def planner(self) -> OffloadPlanner:
        """One for each instance."""

    def setup(self, facts: Facts) -> Setup:
        """As above. Raises ConfigError where there is no host to offload to."""
        if not facts.has_host:
            raise ConfigError("cluster.host_bytes is 0, and this policy offloads KV to the host: give it")
        return Setup(host="offload", offload=self.planner)


def with_spread(requests: Sequence[Decode], spread: Spread) -> list[Decode]:
    """The requests as they would be with one spread."""
    return [
        Decode(
            request_id=r.request_id, num_tokens=r.num_tokens, slo_s=r.slo_s, deposit_tokens=r.deposit_tokens,
            paused_s=r.paused_s, spread=spread,
        )
        for r in requests
    ]  # fmt: skip


def uniform_spreads(machine: Machine) -> list[Spread]:
    """None away first, then from the widest distance to all layers."""
    return [RESIDENT, *(Spread(d, d - 1) for d in reversed(distances(machine.num_layers)))]


def widest(requests: Sequence[Decode], machine: Machine, steps: int = 0) -> Spread:
    """The widest distance that fits after so many steps; all layers away where none does."""
    for spread in uniform_spreads(machine):
        if predicted_s(with_spread(requests, spread), machine, steps) < float("inf"):
            return spread
    return Spread(1, 0)


def quickest(requests: Sequence[Decode], machine: Machine) -> Spread:
    """The distance with the shortest step."""
    return min(uniform_spreads(machine), key=lambda spread: predicted_s(with_spread(requests, spread), machine))
