"""Laws of step times, from tables and from cost models alike."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.cost_model import Chunk, CostModel
from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.config import SimulationConfig
from pengserve.simulator.hardware.catalog import gpu, load_catalog, model
from pengserve.simulator.timing.choose import host, profile_times, step_times
from pengserve.simulator.timing.coefficients import Coefficients, Host, TableTimes, measured
from pengserve.simulator.timing.cost_model_times import CostModelTimes, fit_cost_model
from pengserve.simulator.timing.steps import Batch, ModelTimes

COSTS = CostModel(prefix_attention_s=5e-8, self_attention_s=2e-8, kv_read_s=4e-7, ffn_s=7e-5, other_s=6e-5, load_s=4e-3)
ALL: dict[str, ModelTimes] = {
    "measured": step_times(gpu("h100"), model("qwen3-32b"), 2).times,
    "hidden host": step_times(gpu("h100"), model("qwen3-0.6b"), 1, async_scheduling=True).times,
    "derived": step_times(gpu("rtx-4090"), model("llama3.1-8b")).times,
    "cost model": CostModelTimes(COSTS, host_s=1e-3),
    "profile": profile_times(load_catalog().profile("cpu-demo")).times,
}
KINDS = pytest.mark.parametrize("times", ALL.values(), ids=ALL.keys())
DECODES = st.builds(lambda num, mean: Batch(num, num * mean), st.integers(1, 256), st.integers(1, 8000))


@KINDS
@given(batch=DECODES, num_steps=st.integers(0, 200))
def test_decodes_in_a_row_take_what_their_steps_add_up_to(times, batch, num_steps):
    num, context = batch.num_decodes, batch.context_tokens
    total_s = sum(times.step_s(Batch(num, context + index * num)) for index in range(num_steps))
    assert times.decodes_s(batch, num_steps) == pytest.approx(total_s, rel=1e-9, abs=1e-12)


@KINDS
@given(batch=DECODES, num_steps=st.integers(0, 100_000))
def test_steps_within_is_the_inverse(times, batch, num_steps):
    assert times.steps_within(batch, times.decodes_s(batch, num_steps)) == num_steps


@pytest.mark.parametrize(
    ("name", "host_s"),
    [
        ("measured", lambda num: host().seconds(num)),
        ("derived", lambda num: host().seconds(num)),
        ("cost model", lambda num: 1e-3),
        ("profile", lambda num: 0.0),
    ],
)
@given(batch=DECODES, num_stages=st.integers(2, 8))
def test_stages_together_take_the_layers_once_and_the_host_s_part_each(name, host_s, batch, num_stages):
    whole_s, stage_s = ALL[name].step_s(batch), ALL[name].stage(num_stages).step_s(batch)
    assert num_stages * stage_s == pytest.approx(whole_s + (num_stages - 1) * host_s(batch.num_decodes))


@given(batch=DECODES)
def test_a_hidden_host_s_part_is_the_least_that_a_stage_takes(batch):
    table = Coefficients(
        launch_s=0.0, sequence_s=0.0, context_s=1e-9, pair_s=1e-9, num_tokens=(1, 512), linear_s=(1e-3, 5e-3)
    )
    shown, hidden = (Host(step_s=1e-3, sequence_s=2e-5, is_hidden=is_hidden) for is_hidden in (False, True))
    host_s = shown.seconds(batch.num_decodes)
    device_s = TableTimes(table, shown).step_s(batch) - host_s
    assert TableTimes(table, hidden).step_s(batch) == pytest.approx(max(device_s, host_s))
    assert TableTimes(table, hidden).stage(4).step_s(batch) == pytest.approx(max(device_s / 4, host_s))


@KINDS
@given(num=st.integers(2, 1024), prefix=st.integers(0, 30_000))
def test_a_longer_prefix_never_takes_less(times, num, prefix):
    def step_s(prefix_tokens: int) -> float:
        return times.step_s(Batch(0, 0, (Chunk(prefix_tokens=prefix_tokens, num_tokens=num),)))

    assert step_s(prefix) <= step_s(prefix + 100)


@KINDS
def test_a_stage_of_a_stage_is_a_smaller_stage(times):
    batch = Batch(32, 32_000)
    assert times.stage(2).stage(2).step_s(batch) == pytest.approx(times.stage(4).step_s(batch))


@pytest.mark.parametrize("name", ["measured", "derived"])
def test_decodes_beside_a_prefill_take_less_than_each_alone(name):
    times, prefill = ALL[name], (Chunk(prefix_tokens=0, num_tokens=1024),)
    together_s = times.step_s(Batch(64, 64_000, prefill))
    assert together_s < times.step_s(Batch(64, 64_000)) + times.step_s(Batch(0, 0, prefill)) - 5e-3
    assert together_s > max(times.step_s(Batch(64, 64_000)), times.step_s(Batch(0, 0, prefill)))


def test_a_cost_model_s_steps_are_its_batches():
    source = random.Random(0)
    for _ in range(50):
        decodes = [Chunk(prefix_tokens=source.randint(0, 4000), num_tokens=1) for _ in range(source.randint(0, 40))]
        prefills = [Chunk(prefix_tokens=source.randint(0, 4000), num_tokens=source.randint(2, 900)) for _ in range(3)]
        batch = Batch(len(decodes), sum(chunk.prefix_tokens + 1 for chunk in decodes), tuple(prefills))
        assert CostModelTimes(COSTS).step_s(batch) == pytest.approx(COSTS.batch_s([*decodes, *prefills]))


def test_a_cost_model_comes_back_from_its_own_times():
    found, error = fit_cost_model(CostModelTimes(COSTS), max_batched_tokens=2048, max_num_seqs=64, max_model_len=8192)
    assert error < 1e-6
    assert found.ffn_s == pytest.approx(COSTS.ffn_s, rel=1e-6)


@pytest.mark.parametrize("name", ["measured", "derived", "hidden host"])
def test_a_planner_s_cost_model_is_within_ten_percent_of_the_tables(name):
    _, error = fit_cost_model(ALL[name], max_batched_tokens=2048, max_num_seqs=256, max_model_len=8192)
    assert error < 0.1


def test_every_measured_row_is_found_without_assumptions_but_for_its_own_error():
    catalog = load_catalog()
    for (gpu_name, model_name, tp), row in measured().items():
        found = step_times(catalog.gpu(gpu_name), catalog.model(model_name), tp)
        assert len(found.assumptions) == (row.error > 0.05), (gpu_name, model_name, tp)


def test_more_bandwidth_and_flops_never_take_longer():
    slow, fast = (step_times(gpu(name), model("llama3-8b")).times for name in ("a10", "l20"))
    for batch in (Batch(1, 100), Batch(64, 64_000)):
        assert fast.step_s(batch) < slow.step_s(batch)


def test_a_group_of_a800s_pays_for_its_narrower_links_alone():
    a100, a800 = (step_times(gpu(name), model("qwen2.5-14b"), 2).times for name in ("a100", "a800"))
    alone = (step_times(gpu(name), model("qwen2.5-14b"), 1).times for name in ("a100", "a800"))
    prefill = Batch(0, 0, (Chunk(prefix_tokens=0, num_tokens=4096),))
    assert len({times.step_s(prefill) for times in alone}) == 1
    assert a100.step_s(prefill) < a800.step_s(prefill) < 1.5 * a100.step_s(prefill)


def test_what_was_not_measured_is_said():
    timing = step_times(gpu("rtx-4090"), model("llama3.1-8b"))
    assert "RTX-4090" in timing.assumptions[0]
    assert "l40s" in timing.assumptions[0]


@pytest.mark.parametrize(
    ("device", "name", "tp", "sentence"),
    [
        ("h100", "qwen3-30b-a3b", 1, "mixture of experts"),
        ("h100", "qwen3-8b", 3, "32 heads, which 3 GPUs cannot share"),
        ("cpu", "qwen3-8b", 1, "CPU"),
    ],
)
def test_what_cannot_be_timed_is_one_sentence(device, name, tp, sentence):
    with pytest.raises(ConfigError, match=sentence):
        step_times(gpu(device), model(name), tp)


def test_a_host_s_part_that_is_hidden_never_makes_a_step_longer():
    plain, hidden = (
        step_times(gpu("a100"), model("llama3-8b"), async_scheduling=hides).times for hides in (False, True)
    )
    for batch in (Batch(1, 100), Batch(64, 64_000), Batch(8, 8000, (Chunk(prefix_tokens=0, num_tokens=2000),))):
        assert hidden.step_s(batch) < plain.step_s(batch)


def test_a_gpu_that_reaches_more_of_its_sheet_is_faster_where_it_counts():
    device, spec = gpu("rtx-4090"), model("llama3.1-8b")
    prompt, decodes = Batch(0, 0, (Chunk(prefix_tokens=0, num_tokens=2048),)), Batch(8, 8000)
    plain = step_times(device, spec).times
    quick_products = step_times(replace(device, reached_flops=1.2), spec).times
    quick_reads = step_times(replace(device, reached_hbm=1.2), spec).times
    assert quick_products.step_s(prompt) < plain.step_s(prompt)
    assert quick_products.step_s(decodes) == pytest.approx(plain.step_s(decodes))
    assert quick_reads.step_s(decodes) < plain.step_s(decodes)


def test_a_profile_with_asynchronous_scheduling_is_one_sentence():
    with pytest.raises(ConfigError, match="leave async_scheduling out"):
        SimulationConfig.parse({"cluster": {"profile": "cpu-demo", "async_scheduling": True}})
