"""LayerKV's Eq. 1-5 and Algorithm 1, on cases that were worked out by hand, and some laws."""

import itertools
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.kv_forecast import Holding, Offload, early_offloads, forecast
from pengserve.planners.slo_admission import (
    Decoding,
    OffloadCost,
    PrefillCost,
    least_allow_s,
    num_prefills,
    spread_away,
)


def decoding(slo_s: float, past_tokens: int, past_s: float, future_tokens: int) -> Decoding:
    return Decoding(slo_s=slo_s, past_tokens=past_tokens, past_s=past_s, future_tokens=future_tokens)


def test_equation_1_by_hand() -> None:
    """0.2 s allowed for each of 50 + 100 tokens are 30 s; 50 took 4 s, and 100 more take 5 s at 0.05 s each: 21 s."""
    assert decoding(0.2, 50, 4.0, 100).allow_prefill_s(0.05) == pytest.approx(21.0)


def test_the_future_has_at_least_one_token() -> None:
    assert decoding(0.2, 50, 4.0, -7).allow_prefill_s(0.05) == pytest.approx(0.2 * 51 - 4.05)


def test_what_is_late_already_allows_nothing() -> None:
    assert decoding(0.1, 10, 3.0, 5).allow_prefill_s(0.05) == pytest.approx(1.5 - 3.25)


def test_equation_3_by_hand() -> None:
    """7e9 parameters, hidden size 4096, 1e14 FLOP/s: 2048 tokens take 2048 * (14e9 + 2048 * 8192) / 1e14 s."""
    cost = PrefillCost.of_model(7_000_000_000, 4096, 1e14)
    assert cost.prefill_s(2048) == pytest.approx(2048 * (14e9 + 2048 * 8192) / 1e14)
    assert PrefillCost.of_model(7_000_000_000, 4096, 1e14, alpha=2.0).prefill_s(100) == 2 * cost.prefill_s(100)
    assert cost.prefill_s(4096) > 2 * cost.prefill_s(2048), "it grows faster than the prompt"


@pytest.mark.parametrize(
    ("prefills_s", "allowed"),
    [
        ([], 0),
        ([2.0, 3.0, 4.0], 2),  # 2, 5, 9 against 6
        ([7.0], 0),
        ([6.0], 0),  # less, not as much
        ([5.9], 1),
        ([1.0] * 9, 5),
        ([7.0, 0.1], 0),  # in their order: the first one blocks the second
    ],
)
def test_algorithm_1_by_hand(prefills_s: list[float], allowed: int) -> None:
    """The least that a request allows is 6 s: 0.1 * (20 + 80) - (2 + 0.025 * 80); the other one allows 21 s."""
    here = [decoding(0.2, 50, 4.0, 180), decoding(0.1, 20, 2.0, 80)]
    assert least_allow_s(here, 0.025) == pytest.approx(6.0)
    exact = [round(value, 6) for value in prefills_s]
    assert num_prefills(exact, [decoding(0.1, 20, 2.0, 80), *here[:1]], 0.025) == allowed


def test_prompts_that_have_begun_count_first() -> None:
    here = [decoding(0.1, 20, 2.0, 80)]  # it allows 6 s
    assert [num_prefills([3.0, 4.0], here, 0.025, begun_s=begun_s) for begun_s in (0.0, 2.0, 3.0, 9.0)] == [1, 1, 0, 0]


def test_where_none_has_an_slo_all_may_begin() -> None:
    assert least_allow_s([], 0.1) == inf and num_prefills([1e9] * 3, [], 0.1) == 3


@given(
    prefills_s=st.lists(st.integers(1, 50), max_size=12),
    here=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 50), st.integers(0, 300), st.integers(1, 50)), max_size=5
    ),
)
def test_it_is_the_most_that_fits(prefills_s: list[int], here: list[tuple[int, int, int, int]]) -> None:
    requests = [decoding(float(slo), past, float(past_s), future) for slo, past, past_s, future in here]
    count = num_prefills([float(p) for p in prefills_s], requests, 2.0)
    allow_s = least_allow_s(requests, 2.0)
    sums = list(itertools.accumulate(prefills_s, initial=0))
    assert count == 0 or sums[count] < allow_s
    assert count == len(prefills_s) or sums[count + 1] >= allow_s


def test_equation_4_by_hand() -> None:
    """Llama-2-7B in fp16 has 2 * 128 * 32 * 2 B = 16 KiB of KV a token and layer.

    Over 16 GiB/s one layer of 1,024 tokens takes 1/1024 s. A prompt that takes 20/1024 s lets 20 of 32 layers go.
    """
    cost = OffloadCost(bytes_per_token=2 * 128 * 32 * 2, link_bytes_per_s=16 * 2**30)
    assert cost.offload_s(1024, 1) == pytest.approx(1 / 1024)
    assert cost.kept_layers(1024, 32, 20 / 1024) == 12
    assert cost.kept_layers(1024, 32, 20.9 / 1024) == 12
    assert cost.kept_layers(1024, 32, 40 / 1024) == 0, "a long prompt keeps none"
    assert cost.kept_layers(1024, 32, 0.0) == 32
    assert OffloadCost(bytes_per_token=1, link_bytes_per_s=1, beta=2.0).kept_layers(1, 8, 10.0) == 3


@given(tokens=st.integers(1, 10**5), layers=st.integers(1, 96), prefill_ms=st.integers(0, 10**5))
def test_what_leaves_is_hidden_and_one_layer_more_is_not(tokens: int, layers: int, prefill_ms: int) -> None:
    cost, prefill_s = OffloadCost(bytes_per_token=4096, link_bytes_per_s=1e10), prefill_ms / 1e3
    kept = cost.kept_layers(tokens, layers, prefill_s)
    assert cost.offload_s(tokens, layers - kept) <= prefill_s * (1 + 1e-9)
    assert kept == 0 or cost.offload_s(tokens, layers - kept + 1) > prefill_s * (1 - 1e-9)


@pytest.mark.parametrize(
    ("layers", "away", "expected"), [(8, 4, (0, 2, 4, 6)), (8, 0, ()), (8, 8, tuple(range(8))), (9, 3, (0, 3, 6))]
)
def test_layers_are_spread_evenly(layers: int, away: int, expected: tuple[int, ...]) -> None:
    assert spread_away(layers, away) == expected


def test_equation_5_by_hand() -> None:
    """Blocks of 16 tokens, 10 are free. A ends within a stage, B within three, C later.

    stage 0: 10            in it each of three takes one, and A gives back its 4 and that one: 10 - 3 + 5 = 12
    stage 1: 12            two take one each: 10
    stage 2: 10            two take one each, and B gives back 6 + 3: 10 - 2 + 9 = 17
    stage 3: 17            C takes one: 16
    """
    running = [
        Holding(request_id="a", num_blocks=4, left_tokens=10),
        Holding(request_id="b", num_blocks=6, left_tokens=40),
        Holding(request_id="c", num_blocks=2, left_tokens=999),
    ]
    assert forecast(10, running, 16, 5) == [10, 12, 10, 17, 16]
    assert forecast(1, [running[2]], 16, 4) == [1, 0, -1, -2], "what is missing is said"


def test_the_newest_leave_first_and_half_of_their_layers_before_all() -> None:
    old = Holding(request_id="old", num_blocks=10, left_tokens=9, kept_layers=8, started_s=1.0)
    new = Holding(request_id="new", num_blocks=10, left_tokens=9, kept_layers=8, started_s=2.0)
    both, layers = [old, new], 8

    def away(missing: float) -> tuple[Offload, ...]:
        return early_offloads(missing, both, layers)

    half_new, half_old = Offload(request_id="new", num_layers=4), Offload(request_id="old", num_layers=4)
    assert away(0) == ()
    assert away(5) == (half_new,)  # 4 layers of 10 blocks are 40 cells: 5 blocks of 8 layers
    assert away(6) == (half_new, half_old)
    assert away(11) == (Offload(request_id="new", num_layers=8), half_old)
    assert away(99) == (Offload(request_id="new", num_layers=8), Offload(request_id="old", num_layers=8))
