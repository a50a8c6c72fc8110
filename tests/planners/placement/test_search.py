"""Laws of the search: it equals brute force where there are few choices, and beats one spread for all."""

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.placement.search import Problem, Search, most_resident
from pengserve.planners.placement.spread import Spread
from tests.planners.placement.reference import all_spreads, best_cost_s, cost_s, uniform_costs_s

INFINITE = float("inf")


@st.composite
def problems(draw: st.DrawFn, most_requests: int, most_layers: int) -> Problem:
    num_layers = draw(st.integers(2, most_layers))
    full = draw(st.lists(st.integers(1, 40), min_size=1, max_size=most_requests))
    known = list(all_spreads(num_layers))
    is_new = draw(st.booleans())
    spreads = st.just(Spread()) if is_new else st.sampled_from([*known, Spread(num_layers - 1 or 1, 0)])
    return Problem(
        full=tuple(full),
        num_spare=draw(st.integers(-sum(full) * num_layers, sum(full))),
        num_layers=num_layers,
        layer_s=1.0,
        cells_per_s=draw(st.sampled_from([0.5, 3.0, 10.0, 40.0])),
        window=draw(st.integers(1, 20)),
        now=tuple(draw(spreads) for _ in full),
        can_leave_free=tuple(draw(st.booleans()) for _ in full),
    )


@given(problems(most_requests=3, most_layers=5))
def test_small_cases_are_solved_as_by_brute_force(problem: Problem) -> None:
    found, best_s = Search(problem).best(), best_cost_s(problem)
    kept_s = cost_s(problem, problem.now)  # with a distance that the search would not choose by itself
    if found is None:
        assert best_s == INFINITE
    else:
        assert found.cost_s <= best_s * (1 + 1e-4) + 1e-6
        assert found.cost_s >= min(best_s, kept_s) - 1e-6
        assert abs(found.cost_s - cost_s(problem, found.spreads)) <= 1e-4 * found.cost_s + 1e-6


@given(problems(most_requests=12, most_layers=40))
def test_it_is_never_worse_than_one_spread_for_all(problem: Problem) -> None:
    found, uniform_s = Search(problem).best(), min(uniform_costs_s(problem))
    assert (found.cost_s if found is not None else INFINITE) <= uniform_s * (1 + 1e-4) + 1e-6


@given(problems(most_requests=12, most_layers=40))
def test_what_it_finds_fits_and_costs_what_it_says(problem: Problem) -> None:
    found = Search(problem).best()
    if found is not None:
        assert abs(cost_s(problem, found.spreads) - found.cost_s) <= 1e-4 * found.cost_s + 1e-6


@given(problems(most_requests=12, most_layers=40))
def test_where_anything_fits_there_is_a_placement_at_once(problem: Problem) -> None:
    found = most_resident(problem)
    assert (found is None) == (min(uniform_costs_s(problem)) == INFINITE)
    if found is not None:
        assert cost_s(problem, found.spreads) < INFINITE


@given(problems(most_requests=6, most_layers=20))
def test_the_same_problem_has_the_same_answer(problem: Problem) -> None:
    assert Search(problem).best() == Search(problem).best()
