"""Laws of the fluid model: requests are conserved, and what is faster or has more room is not worse."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pengserve.planners.judge.cohorts import COHORTS
from pengserve.planners.judge.course import slices
from pengserve.planners.judge.fluid import predict
from pengserve.planners.judge.rows import Rows
from pengserve.planners.types.step_cost import StepCost
from tests.support.effort import examples

# About a 14B model on one A800.
COST = StepCost(load_s=0.02, token_s=5e-5, extra_s=6e-5, seq_s=5e-5, context_s=1.3e-7, pair_s=2.7e-9)
TP2 = StepCost(load_s=0.0125, token_s=5e-5, extra_s=4e-5, seq_s=4e-5, context_s=6.7e-8, pair_s=1.3e-9)


def row(cost: StepCost = COST, ages: Sequence[float] = (0.0,) * COHORTS, **given: float) -> Rows:
    values = {
        "servers": 1.0,
        "kv_tokens": 150e3,
        "slots": 256.0,
        "running": 0.0,
        "held_tokens": 0.0,
        "waiting": 0.0,
        "waiting_tokens": 0.0,
        "again": 0.0,
        "again_tokens": 0.0,
        "stall_s": 0.0,
        "rate": 1.0,
        "prompt_tokens": 1000.0,
        "burst_s": 10.0,
        "read_share": 1.0,
        "output_tokens": 200.0,
        "output_spread": 1.0,
        "pairs": 1000.0,
        "routes": 1.0,
        "spread": 0.5,
        "step_tokens": 2048.0,
        "mates": 0.0,
        "ttft_limit_s": 1.0,
        "tpot_limit_s": 0.1,
        "miss_s": 0.0,
    } | given
    values.setdefault("later_rate", values["rate"])
    return Rows(
        cost=np.array([cost.terms]),
        ages=np.array([ages]),
        **{name: np.array([value]) for name, value in values.items()},
    )


LOADS = {
    "rate": st.floats(0, 10),
    "running": st.integers(0, 200),
    "waiting": st.integers(0, 100),
    "stall_s": st.sampled_from([0.0, 0.5, 3.0]),
    "kv_tokens": st.sampled_from([20e3, 150e3, 1e6]),
    "servers": st.sampled_from([1.0, 2.0, 4.0]),
    "prompt_tokens": st.sampled_from([50.0, 1000.0, 9000.0]),
    "output_tokens": st.sampled_from([1.0, 50.0, 400.0]),
    "output_spread": st.sampled_from([0.0, 0.3, 1.0]),
}


@settings(max_examples=examples(200))
@given(st.fixed_dictionaries(LOADS))
def test_requests_are_conserved_and_nothing_is_negative(load: dict[str, float]) -> None:
    load["held_tokens"] = min(load["kv_tokens"], load["running"] * load["prompt_tokens"])
    load["waiting_tokens"] = load["waiting"] * load["prompt_tokens"]
    fate = predict(row(**load), 20.0)
    came = load["running"] + load["waiting"] + 20.0 * load["rate"]
    assert float(fate.finished[0] + fate.running[0] + fate.queue[0]) == pytest.approx(came, rel=1e-6, abs=1e-6)
    for name in (
        "cost_s",
        "ttft_s",
        "tpot_s",
        "queue",
        "running",
        "finished",
        "recomputed_tokens",
        "request_s",
        "missed",
    ):
        value = float(getattr(fate, name)[0])
        assert np.isfinite(value) and value >= 0, name


def wave(**load: float) -> dict[str, float]:
    """Requests that began together, with answers of one length: all end at once, and their memory is free at once."""
    return {"output_spread": 0.0, "stall_s": 0.0, "servers": 4.0, "output_tokens": 50.0} | load


@settings(max_examples=examples(100))
@given(st.fixed_dictionaries(LOADS))
@example(wave(rate=3.0, running=97, waiting=0, kv_tokens=1e6, prompt_tokens=9000.0))
@example(wave(rate=7.375, running=0, waiting=16, kv_tokens=150e3, servers=1.0, prompt_tokens=1000.0, output_spread=0.3))
@example(wave(rate=8.0, running=142, waiting=37, kv_tokens=150e3, prompt_tokens=1000.0))
def test_a_stall_is_never_predicted_to_help(load: dict[str, float]) -> None:
    load["waiting_tokens"] = load["waiting"] * load["prompt_tokens"]
    load["running"] = min(load["running"], load["kv_tokens"] // (load["prompt_tokens"] + load["output_tokens"]))
    load["held_tokens"] = load["running"] * load["prompt_tokens"]

    def cost_s(stall_s: float) -> float:
        # Where a group can just do what comes, the model jumps between two courses: neighbouring rates count together.
        rows = (
            row(**(load | {"stall_s": stall_s, "rate": share * load["rate"]})) for share in (0.94, 0.97, 1, 1.03, 1.06)
        )
        return sum(float(predict(one, 20.0).cost_s[0]) for one in rows)

    # Answers of one length come in waves; slices of time, and the end of the horizon, blur what a stall does to these.
    least = {1.0: 0.95, 0.3: 0.92, 0.0: 0.85}
    assert cost_s(2.0) >= cost_s(0.0) * least[load["output_spread"]]


def test_the_slices_are_the_horizon() -> None:
    assert slices(20.0).sum() == pytest.approx(20.0)


def test_at_low_load_two_as_one_are_faster_and_at_high_load_slower() -> None:
    def cost_s(rate: float) -> tuple[float, float]:
        alone = 2 * float(predict(row(rate=rate / 2), 20.0).cost_s[0])
        return alone, float(predict(row(TP2, rate=rate, kv_tokens=300e3), 20.0).cost_s[0])

    alone_s, together_s = cost_s(0.5)
    assert together_s < 0.9 * alone_s
    alone_s, together_s = cost_s(14.0)
    assert together_s > 1.1 * alone_s


@pytest.mark.parametrize(("prompt", "is_sooner"), [(50.0, False), (9000.0, True)])
def test_stages_read_chunks_of_a_long_prompt_side_by_side_and_each_chunk_has_the_fixed_part_of_a_step(
    prompt: float, is_sooner: bool
) -> None:
    load = {"rate": 0.4, "prompt_tokens": prompt, "pairs": prompt, "running": 8.0, "held_tokens": 8e3}
    alone, pipeline = (predict(row(servers=s, kv_tokens=s * 150e3, **load), 20.0) for s in (1.0, 4.0))
    assert bool(pipeline.ttft_s[0] < alone.ttft_s[0]) == is_sooner


def test_a_drop_helps_where_memory_is_short_and_not_where_compute_is() -> None:
    """Twice the memory behind the same two processors, at 7 % less speed."""
    slower = StepCost(**{name: getattr(COST, name) * 1.07 for name in COST.__slots__})

    def gain_s(**load: float) -> float:
        half = {name: value / 2 for name, value in load.items() if name in ("rate", "waiting", "waiting_tokens")}
        kept = 2 * float(predict(row(**(load | half)), 20.0).cost_s[0])
        wide = load | {"kv_tokens": 3 * load["kv_tokens"], "servers": 2.0}
        return kept - float(predict(row(slower, **wide), 20.0).cost_s[0])

    short_of_memory = {"kv_tokens": 30e3, "prompt_tokens": 1000.0, "output_tokens": 400.0, "rate": 6.0}
    assert gain_s(**short_of_memory) > 0
    short_of_compute = {"kv_tokens": 150e3, "prompt_tokens": 2000.0, "output_tokens": 50.0, "rate": 14.0}
    assert gain_s(**short_of_compute) < 0


@settings(max_examples=examples(100))
@given(st.lists(st.fixed_dictionaries(LOADS), min_size=2, max_size=4))
def test_what_is_predicted_of_a_row_does_not_depend_on_what_else_is_priced(loads: list[dict[str, float]]) -> None:
    """Else options that are not taken would change a decision."""
    for load in loads:
        load["held_tokens"] = min(load["kv_tokens"], load["running"] * load["prompt_tokens"])
        load["waiting_tokens"] = load["waiting"] * load["prompt_tokens"]
    rows = [row(**load) for load in loads]
    together = predict(Rows.joined(rows), 20.0)
    for at, one in enumerate(rows):
        alone = predict(one, 20.0)
        for name in ("cost_s", "ttft_s", "tail_s", "tpot_s", "queue", "missed", "full_s"):
            expected = pytest.approx(float(getattr(alone, name)[0]), rel=1e-9, abs=1e-9)
            assert float(getattr(together, name)[at]) == expected, name


@settings(max_examples=examples(100))
@given(st.fixed_dictionaries(LOADS | {"waiting": st.integers(1, 100), "share": st.floats(0, 1)}))
def test_those_that_wait_after_their_first_token_cost_less_and_are_not_late(load: dict[str, float]) -> None:
    share, load["miss_s"] = load.pop("share"), 10.0
    load["held_tokens"] = min(load["kv_tokens"], load["running"] * load["prompt_tokens"])
    load["waiting_tokens"] = load["waiting"] * load["prompt_tokens"]
    load["tpot_limit_s"] = 1e6  # nothing is slow
    fresh, mixed, begun = (predict(row(**load, again=part * load["waiting"]), 20.0) for part in (0.0, share, 1.0))
    for name in ("finished", "queue", "running", "request_s", "recomputed_tokens"):
        assert float(getattr(mixed, name)[0]) == pytest.approx(float(getattr(fresh, name)[0]), rel=1e-6, abs=1e-5)
    assert float(mixed.cost_s[0]) <= float(fresh.cost_s[0]) * 1.001 + 1e-6
    if not load["rate"]:
        assert max(float(found[0]) for found in (begun.missed, begun.ttft_s, begun.tail_s)) < 1e-9


def test_one_that_waits_long_after_its_first_token_is_slow() -> None:
    """Ten answers of about 200 tokens, which may take 0.1 s each: none can go on for so many seconds."""
    load = {"rate": 0.0, "waiting": 10.0, "again": 10.0, "again_tokens": 1e3, "waiting_tokens": 11e3}
    rows = [row(**load, stall_s=stall_s, output_spread=0.1) for stall_s in (0.0, 5.0, 18.0)]
    missed = predict(Rows.joined(rows), 20.0).missed
    assert missed[0] < 1.0 and missed[2] > 9.0 and missed[0] <= missed[1] <= missed[2]


def test_rows_may_have_horizons_of_their_own() -> None:
    rows = [row(rate=1.0), row(TP2, rate=9.0, later_rate=1.0), row(rate=3.0, waiting=20.0, waiting_tokens=20e3)]
    horizons_s = [20.0, 7.0, 60.0]
    alike, each = predict(Rows.joined(rows), 20.0), predict(Rows.joined(rows), np.array(horizons_s))
    for at, (one, horizon_s) in enumerate(zip(rows, horizons_s, strict=True)):
        assert float(predict(one, 20.0).cost_s[0]) == pytest.approx(float(alike.cost_s[at]))
        assert float(predict(one, horizon_s).cost_s[0]) == pytest.approx(float(each.cost_s[at]))


def test_more_memory_is_never_predicted_to_be_worse_where_nothing_is_slower() -> None:
    for rate in (1.0, 4.0, 8.0):
        costs = [float(predict(replace(row(rate=rate), kv_tokens=np.array([kv])), 20.0).cost_s[0]) for kv in (3e4, 3e5)]
        assert costs[1] <= costs[0] * 1.001


@pytest.mark.parametrize("cost", [replace(COST, load_s=0.0), StepCost(**dict.fromkeys(COST.__slots__, 0.0))])
def test_a_fit_that_finds_no_cost_still_gives_finite_figures(cost: StepCost) -> None:
    fate = predict(row(cost), 30.0)
    assert all(np.isfinite(getattr(fate, name)).all() for name in fate.__slots__)
