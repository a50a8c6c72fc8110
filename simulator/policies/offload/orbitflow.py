"""OrbitFlow: the production placement planner, called when the batch changes, steps drift, or a solution expires.

Its ablations (section 5.4): one spread for all (`per_request: false`), no pauses (`pauses: false`), and no token
deposit (`deposit: false`).
"""

from collections.abc import Sequence
from dataclasses import replace

from pengserve.planners.placement.solver import solve
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig
from pengserve.planners.placement.watch import InForce, pays, reason_to_solve
from pengserve.simulator.engine.offload.planner import OffloadPlanner, Placed, uniform
from pengserve.simulator.policies.offload.base import OffloadPolicy, quickest


class OrbitFlow(OffloadPolicy):
    """With `deposit`, a request with tokens in store may be paused while its client notices nothing."""

    per_request: bool = True
    pauses: bool = True
    deposit: bool = True
    max_paused_s: float = 10.0

    def planner(self) -> OffloadPlanner:
        """OrbitFlow's, or the quickest distance for all."""
        if not self.per_request:
            return _Uniform()
        config = PlacementConfig(may_pause=self.pauses, max_paused_s=self.max_paused_s)
        return _Solved(config, has_deposit=self.deposit)


class _Uniform:
    """The quickest distance for all, in every iteration."""

    def place(self, requests: Sequence[Decode], machine: Machine, last_step_s: float | None) -> Placed:
        return uniform(requests, quickest(requests, machine))


class _Solved:
    def __init__(self, config: PlacementConfig, *, has_deposit: bool) -> None:
        self._config, self._has_deposit = config, has_deposit
        self._force: InForce | None = None
        self.num_solved = 0

    def place(self, requests: Sequence[Decode], machine: Machine, last_step_s: float | None) -> Placed:
        if not self._has_deposit:
            requests = [replace(request, deposit_tokens=0) for request in requests]
        force = self._force
        if force is None or self._is_due(force, requests, machine, last_step_s):
            self.num_solved += 1
            solution = solve(requests, machine, self._config)
            if force is not None and solution.spreads and not pays(solution, requests, machine):
                solution = replace(solution, spreads=tuple((r.request_id, r.spread) for r in requests))
            force = InForce(solution=solution, request_ids=frozenset(r.request_id for r in requests))
        self._force = replace(force, age=force.age + 1)
        return Placed(dict(force.solution.spreads), frozenset(force.solution.paused))

    def _is_due(self, force: InForce, requests: Sequence[Decode], machine: Machine, last_step_s: float | None) -> bool:
        if last_step_s is None:
            return True
        starving = any((r.paused_s or 0.0) >= self._config.max_paused_s for r in requests)
        spent = any(r.paused_s is not None and r.slo_s is not None and not r.deposit_tokens for r in requests)
        # A step that copies what a new placement moves takes longer once: that is no drift.
        return (
            starving
            or (spent and force.age >= self._config.min_window)
            or bool(reason_to_solve(force, requests, last_step_s, machine, self._config) if force.age > 1 else "")
        )
