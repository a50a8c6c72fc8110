"""When a placement is made anew, whether that pays, and whose layers move with it (OrbitFlow section 3.4)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pengserve.planners.placement.solver import predicted_s
from pengserve.planners.placement.spread import Spread
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig, Solution

SMOOTHING = 0.2  # of a new measurement, in the figures that predictions stand on


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """A solution since it was carried out."""

    solution: Solution
    request_ids: frozenset[str]  # that it is about, the paused ones too
    age: int = 0  # steps


def reason_to_solve(
    force: InForce | None, requests: Sequence[Decode], step_s: float, machine: Machine, config: PlacementConfig
) -> str:
    """Why a new solution is needed after a step; empty where the present one stands.

    Args:
        requests: as they are after the step, with their spreads.
        step_s: what the step took.
    """
    if force is None:
        return "no placement yet"
    if force.request_ids != {request.request_id for request in requests}:
        return "another batch"
    if force.age >= force.solution.expires_in:
        return f"expired after {force.age} steps"
    foretold_s = predicted_s([r for r in requests if r.paused_s is None], machine)
    if abs(step_s - foretold_s) > config.drift * foretold_s:
        return f"a step took {step_s * 1e3:.1f} ms, and {foretold_s * 1e3:.1f} ms were predicted"
    return ""


def remeasured(
    machine: Machine, *, computed_s: float, num_context: int, copied_cells: int = 0, copied_s: float = 0.0
) -> Machine:
    """The machine with a step's figures in it: an exponentially weighted mean, as OrbitFlow's monitor keeps it.

    Args:
        computed_s: the step without what it waited for copies.
        num_context: tokens of KV that it read.
        copied_cells, copied_s: cells from the host, and the time that the link took for them.
    """
    foretold_s = machine.step_s + machine.context_s * num_context
    factor = 1.0 + SMOOTHING * (computed_s / foretold_s - 1.0)
    link = machine.cells_per_s
    if copied_cells and copied_s > 0:
        link += SMOOTHING * (copied_cells / copied_s - link)
    return replace(machine, step_s=machine.step_s * factor, context_s=machine.context_s * factor, cells_per_s=link)


def pays(solution: Solution, requests: Sequence[Decode], machine: Machine) -> bool:
    """Whether a solution is worth its move: the steps of its window are shorter by more than the move takes.

    One that pauses or resumes others, or whose predecessor does not fit any more, always is.
    """
    by_id = dict(solution.spreads)
    now = {request.request_id for request in requests if request.paused_s is None}
    if now != by_id.keys():
        return True
    as_it_is_s = predicted_s([r for r in requests if r.request_id in by_id], machine, solution.window)
    return (as_it_is_s - solution.step_s) * solution.window > solution.moved_cells / machine.cells_per_s


def moved(solution: Solution, requests: Iterable[Decode]) -> dict[str, Spread]:
    """The spreads of the requests whose layers change; those that stay are left out."""
    before = {request.request_id: request.spread for request in requests}
    return {request_id: spread for request_id, spread in solution.spreads if spread != before[request_id]}
