"""Dynamic heuristic: each step, as few layers away as fit, the largest request first; no latency is predicted."""

from collections.abc import Sequence

from pengserve.planners.placement.solver import cells_of
from pengserve.planners.placement.spread import RESIDENT, Spread
from pengserve.planners.placement.values import Decode, Machine
from pengserve.simulator.engine.offload.planner import OffloadPlanner, Placed
from pengserve.simulator.policies.offload.base import OffloadPolicy, uniform_spreads


class DynamicHeuristic(OffloadPolicy):
    """Chooses anew in every iteration."""

    def planner(self) -> OffloadPlanner:
        """As few layers away as fit, in each step."""
        return _FewestLayers()


class _FewestLayers:
    def place(self, requests: Sequence[Decode], machine: Machine, last_step_s: float | None) -> Placed:
        spreads = dict.fromkeys((request.request_id for request in requests), RESIDENT)
        order = sorted(requests, key=lambda request: (-request.num_tokens, request.request_id))
        for request in order:
            for spread in uniform_spreads(machine):
                spreads[request.request_id] = spread
                if _fits(requests, spreads, machine):
                    return Placed(spreads)
        return Placed(spreads)


def _fits(requests: Sequence[Decode], spreads: dict[str, Spread], machine: Machine) -> bool:
    staged, held = [0] * machine.num_layers, 0
    for request in requests:
        spread = spreads[request.request_id]
        held += cells_of(request.num_tokens, spread, machine)
        for layer in spread.layers(machine.num_layers):
            staged[layer] += request.num_tokens // machine.block_size
    return held + max(staged) <= machine.num_cells
