"""Laws of placements that pay: nothing is moved for nothing, and none misses more SLOs than doing nothing would."""

import math
from dataclasses import replace

from hypothesis import given

from pengserve.planners.placement.solver import as_it_is, predicted_s, solve, whole
from pengserve.planners.placement.spread import RESIDENT
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig, Solution
from pengserve.planners.placement.worth import solve_where_it_pays
from tests.planners.placement.test_solver import A5000, cases, decodes, placed

CONFIG = PlacementConfig()


def after(requests: list[Decode], found: Solution) -> list[Decode]:
    """The requests when a solution is in force."""
    paused = [replace(r, paused_s=r.paused_s or 0.1) for r in requests if r.request_id in found.paused]
    return [*(replace(r, paused_s=None) for r in placed(requests, found)), *paused]


@given(cases())
def test_what_is_chosen_fits_and_misses_no_more_than_what_is_or_than_pausing_alone(
    case: tuple[list[Decode], Machine],
) -> None:
    requests, machine = case
    found = solve_where_it_pays(requests, machine, CONFIG)
    assert {*dict(found.spreads), *found.paused} == {r.request_id for r in requests}
    for option in (as_it_is(requests, machine, CONFIG), whole(requests, machine, CONFIG)):
        if option is not None:
            assert math.isfinite(found.step_s) and math.isfinite(predicted_s(placed(requests, found), machine))
            assert found.num_late <= option.num_late


@given(cases())
def test_a_choice_stands_until_something_changes(case: tuple[list[Decode], Machine]) -> None:
    requests, machine = case
    found = solve_where_it_pays(requests, machine, CONFIG)
    if not math.isfinite(found.step_s) or any((r.paused_s or 0) >= CONFIG.max_paused_s for r in requests):
        return
    again = solve_where_it_pays(after(requests, found), machine, CONFIG)
    assert again.num_late <= found.num_late
    if again.num_late == found.num_late and set(again.paused) != set(found.paused):
        assert len(again.spreads) / again.step_s > len(found.spreads) / found.step_s


def test_the_search_is_left_out_where_its_bounds_say_that_it_cannot_win() -> None:
    """Over a slow link, with none late: who is paused already stays so."""
    requests = decodes(9000, 4000, 2500, 2500, deposit=100)
    requests[1] = replace(requests[1], paused_s=1.0)
    slow = replace(A5000, cells_per_s=1e3)
    found = solve_where_it_pays(requests, slow, CONFIG)
    assert (found.paused, found.why) == (("r1",), "what is in force stays")


def test_the_youngest_whose_client_does_not_notice_is_paused_where_the_link_is_slow() -> None:
    requests = [replace(r, rank=(0, float(i))) for i, r in enumerate(decodes(9000, 4000, 2500, 2500, slo_s=0.2))]
    requests[1] = replace(requests[1], deposit_tokens=50)
    requests[2] = replace(requests[2], deposit_tokens=50)
    slow = replace(A5000, cells_per_s=1e3)
    found = solve_where_it_pays(requests, slow, CONFIG)
    assert found.paused == ("r2",) and found.num_away == 0 and found.num_late == 0


def test_another_is_paused_when_a_deposit_is_spent_and_not_before() -> None:
    requests = decodes(9000, 4000, 4000, slo_s=0.2, deposit=50)
    requests = [replace(requests[0], deposit_tokens=0), requests[1], replace(requests[2], paused_s=1.0)]
    slow = replace(A5000, num_cells=32 * 830, cells_per_s=1e4)
    assert solve_where_it_pays(requests, slow, CONFIG).paused == ("r2",)
    requests[2] = replace(requests[2], deposit_tokens=0)
    assert solve_where_it_pays(requests, slow, CONFIG).paused == ("r1",)


def test_layers_are_away_where_that_makes_more_tokens() -> None:
    requests = decodes(9000, 4000, 2500, 2500)
    assert solve_where_it_pays(requests, A5000, CONFIG).spreads == solve(requests, A5000, CONFIG).spreads
    dear = replace(A5000, staged_s=A5000.step_s)
    found = solve_where_it_pays(requests, dear, CONFIG)
    assert found.paused and all(spread == RESIDENT for _, spread in found.spreads)


def test_who_was_paused_too_long_goes_on() -> None:
    requests = decodes(9000, 4000, 2500, 2500, slo_s=0.2, deposit=100)
    requests[3] = replace(requests[3], paused_s=CONFIG.max_paused_s)
    slow = replace(A5000, cells_per_s=1e3)
    assert "r3" not in solve_where_it_pays(requests, slow, CONFIG).paused


def test_with_a_lead_another_is_paused_before_the_deposit_is_spent_and_not_after_that() -> None:
    requests = decodes(9000, 4000, 4000, slo_s=0.2, deposit=50)
    requests = [replace(requests[0], deposit_tokens=0), requests[1], replace(requests[2], paused_s=1.0)]
    slow, config = replace(A5000, num_cells=32 * 830, cells_per_s=1e4), PlacementConfig(lead_steps=8)
    for deposit, paused in ((3, "r2"), (1, "r1"), (0, "r2")):
        requests[2] = replace(requests[2], deposit_tokens=deposit)
        assert solve_where_it_pays(requests, slow, config).paused == (paused,), deposit


def test_no_slo_is_missed_for_the_sake_of_more_tokens() -> None:
    """All three together make 42 tokens a second and miss the SLO of one, which the cap allows; two of them make 32."""
    requests = decodes(9000, 4000, 4000, slo_s=0.2, deposit=50)
    requests[0] = replace(requests[0], slo_s=0.068, deposit_tokens=0)
    machine = replace(A5000, num_cells=32 * 900, staged_s=0.005)
    assert solve(requests, machine, CONFIG).num_late == 1
    found = solve_where_it_pays(requests, machine, CONFIG)
    assert (found.num_late, found.paused) == (0, ("r1",))
