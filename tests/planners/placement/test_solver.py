"""Laws of the placement planner: what it chooses fits, and is paused or placed for a reason."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.placement.solver import cells_of, fallback, predicted_s, solve
from pengserve.planners.placement.spread import RESIDENT, Spread
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig, Solution
from tests.support.speed import least_cpu_s, slowness

# LLaMA3-8B: a block of 16 tokens is 64 KiB of one of 32 layers. OrbitFlow's own figures of an A5000: 7.6 GB/s, 50 ms.
A5000 = Machine(
    num_layers=32, block_size=16, num_cells=32 * 1024, step_s=0.0495, context_s=9.63e-7, cells_per_s=7.6e9 / 65536
)
# The same model on an H100: 50 GB/s, steps of 6.5 ms and 131 KB of KV a token at 2.7 TB/s.
H100 = Machine(
    num_layers=32, block_size=16, num_cells=32 * 28_000, step_s=0.0065, context_s=4.9e-8, cells_per_s=50e9 / 65536
)


def decodes(*tokens: int, slo_s: float | None = None, deposit: int = 0) -> list[Decode]:
    return [
        Decode(request_id=f"r{i}", num_tokens=count, slo_s=slo_s, deposit_tokens=deposit)
        for i, count in enumerate(tokens)
    ]


def placed(requests: list[Decode], solution: Solution) -> list[Decode]:
    spreads = dict(solution.spreads)
    return [replace(r, spread=spreads[r.request_id]) for r in requests if r.request_id in spreads]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Decode], Machine]:
    num_layers = draw(st.sampled_from([4, 12, 32]))
    requests = [
        Decode(
            request_id=f"r{i}",
            num_tokens=draw(st.integers(1, 4000)),
            slo_s=draw(st.sampled_from([None, 0.05, 0.2])),
            deposit_tokens=draw(st.sampled_from([0, 0, 30])),
            paused_s=draw(st.sampled_from([None, None, 1.0, 60.0])),
            spread=draw(st.sampled_from([RESIDENT, Spread(1, 0), Spread(3, 1)])),
            is_on_host=draw(st.booleans()),
        )
        for i in range(draw(st.integers(1, 10)))
    ]
    whole = sum(cells_of(r.num_tokens, RESIDENT, replace(A5000, num_layers=num_layers)) for r in requests)
    machine = replace(
        A5000,
        num_layers=num_layers,
        num_cells=max(1, int(whole * draw(st.floats(0.2, 1.3)))),
        cells_per_s=draw(st.sampled_from([1e3, 1e5, 1e7])),
    )
    return requests, machine


@given(cases())
def test_what_is_stepped_fits_until_it_expires(case: tuple[list[Decode], Machine]) -> None:
    requests, machine = case
    for found in (solve(requests, machine), fallback(requests, machine)):
        assert {*found.paused, *dict(found.spreads)} == {request.request_id for request in requests}
        assert found.spreads, "no request is ever stepped"
        if math.isfinite(found.step_s):
            assert math.isfinite(predicted_s(placed(requests, found), machine, found.expires_in))
            assert found.expires_in >= found.window
        else:
            assert not found.is_feasible


@given(cases())
def test_a_request_is_paused_beyond_the_limit_only_behind_all_others(case: tuple[list[Decode], Machine]) -> None:
    requests, machine = case
    found, most_s = solve(requests, machine), PlacementConfig().max_paused_s
    longest_s = max((r.paused_s or 0.0 for r in requests if r.request_id in found.paused), default=0.0)
    if longest_s >= most_s:
        assert min(r.paused_s or 0.0 for r in requests if r.request_id not in found.paused) >= longest_s


def test_of_those_that_were_paused_too_long_the_longest_goes_on_and_keeps_its_place() -> None:
    requests = [
        replace(r, paused_s=paused_s) for r, paused_s in zip(decodes(4000, 4000, 4000), (11, 30, 20), strict=True)
    ]
    slow = replace(A5000, cells_per_s=1.0, num_cells=32 * 270)
    assert "r1" in dict(solve(requests, slow).spreads)
    back = [replace(r, paused_s=None, may_pause=False) if r.request_id == "r1" else r for r in requests]
    assert "r1" in dict(solve(back, slow).spreads)


@given(cases())
def test_the_fallback_fits_wherever_the_search_does(case: tuple[list[Decode], Machine]) -> None:
    requests, machine = case
    if math.isfinite(solve(requests, machine).step_s):
        assert math.isfinite(fallback(requests, machine).step_s)


def test_what_fits_stays_on_the_device() -> None:
    found = solve(decodes(4000, 4000), A5000)
    assert found.num_away == 0
    assert not found.paused
    assert found.why == "all requests fit on the device"


def test_a_little_too_much_is_kept_away_where_copies_hide() -> None:
    found = solve(decodes(9000, 4000, 2500, 2500), A5000)
    assert found.num_away > 0
    assert not found.paused
    assert found.step_s == pytest.approx(
        predicted_s(decodes(9000, 4000, 2500, 2500), replace(A5000, num_cells=10**9)), rel=0.05
    )


def test_an_h100_keeps_no_layer_away_and_says_so() -> None:
    """Its link brings a tenth of what attention reads meanwhile: others would wait for it (design section 10)."""
    found = solve(decodes(*[30_000] * 20), H100)
    assert found.num_away == 0
    assert found.paused
    assert "no layer away" in found.why


def test_the_same_gpu_with_a_fast_link_to_its_host_keeps_layers_away() -> None:
    """A GH200 reads its host at 450 GB/s: what does not fit comes beside the computation."""
    found = solve(decodes(*[30_000] * 15), replace(H100, cells_per_s=450e9 / 65536))
    assert found.num_away > 0
    assert not found.paused


def test_who_has_tokens_in_store_is_paused_first() -> None:
    requests = decodes(16_000, 16_000, 16_000, slo_s=0.1)
    requests[1] = replace(requests[1], deposit_tokens=100)
    assert "r1" in solve(requests, A5000).paused


def test_slos_that_a_placement_would_miss_are_kept_by_pausing() -> None:
    """OrbitFlow section 3.3.1, alpha = 1: better one paused than all late."""
    found = solve(decodes(16_000, 6000, 6000, slo_s=0.07), A5000)
    assert found.is_feasible
    assert len(found.paused) == 1
    assert found.step_s <= 0.07


def test_the_window_is_long_where_nothing_is_at_stake_and_short_where_room_runs_out() -> None:
    config = PlacementConfig()
    assert solve(decodes(500, 500), A5000, config).window == config.max_window
    tight = decodes(8150, 8200)
    assert solve(tight, replace(A5000, cells_per_s=2e3), config).window < config.max_window


def test_a_present_placement_that_is_as_good_stays() -> None:
    requests = decodes(9000, 4000, 2500, 2500)
    first = solve(requests, A5000)
    again = solve(placed(requests, first), A5000)
    assert again.spreads == first.spreads
    assert again.moved_cells == 0


def test_what_a_staged_step_takes_more_is_weighed_against_pausing() -> None:
    """Copies hide, so without that cost no request is paused; where a staged step takes half as long again, one is."""
    requests = decodes(9000, 4000, 2500, 2500)
    found = solve(requests, replace(A5000, staged_s=0.5 * A5000.step_s))
    assert found.num_away == 0 and len(found.paused) == 1
    little = replace(A5000, staged_s=0.001)
    cheap = solve(requests, little)
    assert cheap.num_away > 0
    assert cheap.step_s == pytest.approx(predicted_s(placed(requests, cheap), little, cheap.window), rel=1e-6)


def test_wrong_figures_are_refused() -> None:
    with pytest.raises(ValueError, match="min_window"):
        PlacementConfig(min_window=9, max_window=8)
    with pytest.raises(ValueError, match="max_late"):
        PlacementConfig(max_late=-1)


def test_64_requests_and_80_layers_take_milliseconds() -> None:
    machine = replace(A5000, num_layers=80, num_cells=80 * 20_000, context_s=3e-8, cells_per_s=1e7)
    requests = decodes(*[300 + 173 * i % 11_000 for i in range(64)])
    assert solve(requests, machine).num_away
    assert least_cpu_s(lambda: solve(requests, machine), times=9) < 0.005 * slowness()
