"""Laws of the time that a step with layers on the host takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.placement.latency import least_stalls_s, stall_s
from pengserve.planners.placement.spread import RESIDENT, Spread, distances, uniform_spreads
from tests.planners.placement.reference import algorithm_1, all_spreads, ring_stall_s

LAYERS = st.lists(st.integers(0, 6), min_size=1, max_size=14)
RATES = st.sampled_from([0.5, 1.0, 3.0, 20.0])


def staged(sizes: list[int], spreads: list[Spread], num_layers: int) -> list[int]:
    found = [0] * num_layers
    for size, spread in zip(sizes, spreads, strict=True):
        for layer in spread.layers(num_layers):
            found[layer] += size
    return found


@pytest.mark.parametrize(
    ("sizes", "spreads", "free", "stalls"),
    [
        ([3, 6], [Spread(3, 2), Spread(3, 2)], 9, 9),  # step 1, placement A
        ([3, 6], [RESIDENT, Spread(3, 2)], 6, 0),  # placement B
        ([4, 6], [Spread(3, 2), Spread(3, 2)], 10, 12),  # step 16, placement A
        ([4, 6], [Spread(4, 3), Spread(3, 2)], 20, 2),  # placement C, with room for what is in flight
    ],
)
def test_the_example_of_the_paper_comes_out(sizes: list[int], spreads: list[Spread], free: int, stalls: float) -> None:
    """OrbitFlow section 2.3: nine layers, a device of 70 blocks, 3 blocks copied while a layer is computed."""
    assert stall_s(staged(sizes, spreads, 9), 3.0, 1.0, free) == pytest.approx(stalls)


@given(LAYERS, RATES, st.integers(0, 20))
def test_copies_follow_each_other_as_in_the_instance(counts: list[int], rate: float, more: int) -> None:
    num_free = max(counts) + more
    assert stall_s(counts, 1.0, rate, num_free) == pytest.approx(ring_stall_s(counts, 1.0, rate, num_free))


@given(st.integers(2, 16), st.data(), RATES, st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_one_spread_for_all_takes_what_algorithm_1_says(
    num_layers: int, data: st.DataObject, rate: float, sizes: list[int]
) -> None:
    spread = data.draw(st.sampled_from(list(all_spreads(num_layers))))
    ours = stall_s(staged(sizes, [spread] * len(sizes), num_layers), 1.0, rate, sum(sizes))
    theirs = algorithm_1([sum(sizes)], [spread], num_layers, 1.0, rate)
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert ours == pytest.approx(algorithm_1(sizes, [spread] * len(sizes), num_layers, 1.0, rate), abs=1e-6)


@given(LAYERS, RATES, st.integers(0, 20))
def test_the_bound_is_one(counts: list[int], rate: float, more: int) -> None:
    num_free = max(counts) + more - 2
    least = least_stalls_s(np.array([counts], dtype=np.float32), 1.0, rate, np.array([num_free]))[0]
    assert least <= stall_s(counts, 1.0, rate, num_free) * (1 + 1e-6) + 1e-9


@given(LAYERS, RATES, st.integers(0, 20), st.integers(1, 5))
def test_more_room_and_a_faster_link_never_hurt(counts: list[int], rate: float, more: int, extra: int) -> None:
    num_free = max(counts) + more
    found = stall_s(counts, 1.0, rate, num_free)
    assert stall_s(counts, 1.0, rate, num_free + extra) <= found + 1e-9
    assert stall_s(counts, 1.0, 2 * rate, num_free) <= found + 1e-9


def test_there_are_as_many_distances_as_the_paper_counts() -> None:
    assert len(distances(32)) - 1 == 9  # D(32), which leaves out distance 1
    assert len(distances(80)) - 1 <= 2 * int(80**0.5) - 1


@given(st.integers(2, 20), RATES)
def test_no_phase_of_a_uniform_spread_is_better_than_the_two(num_layers: int, rate: float) -> None:
    kept = uniform_spreads(num_layers)
    for spread in list(all_spreads(num_layers))[1:]:
        counts, num_away = staged([4], [spread], num_layers), len(spread.layers(num_layers))
        same = [s for s in kept if s.distance == spread.distance and len(s.layers(num_layers)) == num_away]
        found = min(stall_s(staged([4], [s], num_layers), 1.0, rate, 8) for s in same)
        assert found <= stall_s(counts, 1.0, rate, 8) + 1e-9
