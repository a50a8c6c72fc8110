"""Derived coefficients against measured ones: each row that can be is derived from another, and compared."""

from dataclasses import replace
from math import log
from statistics import fmean

import pytest

from pengserve.planners.cost_model import Chunk
from pengserve.simulator.hardware.catalog import gpu, load_catalog, model
from pengserve.simulator.timing.choose import step_times
from pengserve.simulator.timing.coefficients import measured
from pengserve.simulator.timing.roofline import find
from pengserve.simulator.timing.steps import Batch

CATALOG = load_catalog()
DENSE = sorted({name for _, name, _ in measured() if not name.endswith("-fp8") and name != "llama2-7b"})
TPS = (1, 2, 4, 8)
BATCHES = (
    Batch(1, 1000),
    Batch(32, 32_000),
    Batch(128, 128_000),
    Batch(0, 0, (Chunk(prefix_tokens=0, num_tokens=512),)),
    Batch(0, 0, (Chunk(prefix_tokens=0, num_tokens=2048),)),
    Batch(64, 64_000, (Chunk(prefix_tokens=0, num_tokens=2000),)),
)


def error(device: str, name: str, tp: int, *, by_gpu: str | None = None, by_model: str | None = None) -> float:
    """Mean relative error of steps of `name` on `tp` of `device`, derived from other rows, over `BATCHES`."""
    asked_gpu, asked_model = gpu(device), model(name)
    if by_gpu:
        asked_gpu = replace(asked_gpu, timed_as=by_gpu)
    if by_model:
        asked_model = replace(asked_model, timed_as=by_model)
    derived, known = step_times(asked_gpu, asked_model, tp), step_times(gpu(device), model(name), tp)
    assert "were not measured" in derived.assumptions[0]
    return fmean(abs(derived.times.step_s(batch) / known.times.step_s(batch) - 1.0) for batch in BATCHES)


@pytest.mark.parametrize("device", ["h200", "h100", "a100", "l40s"])
def test_another_model_on_the_same_gpu_is_within_three_percent(device):
    def nearest(name: str) -> str:
        params = model(name).params
        return min(
            (other for other in DENSE if other != name), key=lambda other: abs(log(model(other).params / params))
        )

    errors = [error(device, name, tp, by_model=nearest(name)) for name in DENSE for tp in TPS]
    assert fmean(errors) < 0.03


@pytest.mark.parametrize(("device", "other"), [("h200", "h100_sxm"), ("h100", "h200_sxm")])
def test_a_gpu_of_the_same_generation_is_within_six_percent(device, other):
    assert fmean(error(device, name, tp, by_gpu=other) for name in DENSE for tp in TPS) < 0.06


@pytest.mark.parametrize(
    ("device", "other", "tps"),
    [("a100", "h100_sxm", TPS), ("h100", "a100_sxm", (1, 2)), ("l40s", "h100_sxm", (1,)), ("h100", "l40s", (1,))],
)
def test_a_gpu_of_another_generation_is_within_twenty_percent(device, other, tps):
    assert fmean(error(device, name, tp, by_gpu=other) for name in DENSE for tp in tps) < 0.2


@pytest.mark.parametrize("tp", [2, 4])
def test_groups_without_nvlink_are_not_timed_by_groups_with_it(tp):
    bridged, bare = replace(gpu("a6000"), nvlink_bytes_per_s=5.6e10), replace(gpu("a6000"), nvlink_bytes_per_s=0.0)
    assert "l40s" not in find(bridged, model("llama3-8b"), tp)[1][0]
    assert "l40s" in find(bare, model("llama3-8b"), tp)[1][0]


def test_rates_that_are_known_to_be_reached_are_taken():
    plain = replace(gpu("rtx-4090"), reached_hbm=None, reached_flops=None)
    quick = replace(plain, reached_flops=1.2)
    prefill, decode = Batch(0, 0, (Chunk(prefix_tokens=0, num_tokens=2048),)), Batch(1, 1000)
    before, after = (step_times(device, model("llama3-8b")).times for device in (plain, quick))
    assert after.step_s(prefill) < before.step_s(prefill)
    assert after.step_s(decode) == before.step_s(decode)


def test_a_model_of_its_own_is_timed_by_the_one_most_alike():
    mine = replace(model("qwen2.5-14b"), name="mine", timed_as=None, params=15_500_000_000, layers=50)
    notes = find(gpu("h100"), mine, 1)[1]
    assert "those of qwen2.5-14b" in notes[0] or "those of qwen3-14b" in notes[0]
