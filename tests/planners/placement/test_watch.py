"""When a placement is made anew, whether it is worth its move, and whose layers move with it."""

from dataclasses import replace

from pengserve.planners.placement.solver import predicted_s, solve
from pengserve.planners.placement.spread import RESIDENT, Spread
from pengserve.planners.placement.values import Decode, PlacementConfig
from pengserve.planners.placement.watch import InForce, moved, pays, reason_to_solve, remeasured
from tests.planners.placement.test_solver import A5000, decodes, placed

CONFIG = PlacementConfig()


def in_force(requests: list[Decode], age: int = 0) -> InForce:
    ids = frozenset(request.request_id for request in requests)
    return InForce(solution=solve(requests, A5000), request_ids=ids, age=age)


def test_a_placement_stands_until_something_changes() -> None:
    requests = decodes(9000, 4000, 2500, 2500)
    force = in_force(requests)
    now = placed(requests, force.solution)
    step_s = predicted_s(now, A5000)
    assert reason_to_solve(force, now, step_s, A5000, CONFIG) == ""
    assert "another batch" in reason_to_solve(force, now[1:], step_s, A5000, CONFIG)
    assert "were predicted" in reason_to_solve(force, now, 2 * step_s, A5000, CONFIG)
    old = replace(force, age=force.solution.expires_in)
    assert "expired" in reason_to_solve(old, now, step_s, A5000, CONFIG)
    assert reason_to_solve(None, now, step_s, A5000, CONFIG)


def test_measured_steps_move_the_figures() -> None:
    slow = remeasured(A5000, computed_s=0.2, num_context=1000, copied_cells=1000, copied_s=0.1)
    assert A5000.step_s < slow.step_s < 0.2
    assert 10_000 < slow.cells_per_s < A5000.cells_per_s
    for _ in range(60):
        slow = remeasured(slow, computed_s=0.2, num_context=1000, copied_cells=1000, copied_s=0.1)
    assert abs(slow.step_s + 1000 * slow.context_s - 0.2) < 1e-4
    assert abs(slow.cells_per_s - 10_000) < 100


def test_a_move_that_saves_less_than_it_costs_is_left_out() -> None:
    requests = [replace(r, spread=Spread(2, 1), is_on_host=False) for r in decodes(9000, 4000, 2500, 2500)]
    found = solve(requests, A5000)
    assert pays(found, requests, A5000)
    dear = replace(found, moved_cells=10**9)
    assert not pays(dear, requests, A5000)
    assert pays(dear, requests[1:], A5000), "another batch needs another placement"


def test_layers_move_of_those_whose_spread_changes_and_of_no_others() -> None:
    requests = decodes(9000, 4000, 2500, 2500)
    found = solve(requests, A5000)
    away = {name: spread for name, spread in found.spreads if spread.distance}
    assert moved(found, requests) == away and len(away) > 1
    now = placed(requests, found)
    assert moved(found, now) == {}
    first = next(iter(away))
    assert moved(found, [replace(r, spread=RESIDENT) if r.request_id == first else r for r in now]) == {
        first: away[first]
    }
