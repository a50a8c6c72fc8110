"""`pengserve profile`: what it writes is what simulations read."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from pengserve.planners.cost_model import Chunk
from pengserve.planners.types.errors import ConfigError, EngineError
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.profile_process import EngineFacts, find_device
from pengserve.simulator.hardware.catalog import load_catalog
from pengserve.simulator.profiling import Wishes, engine_arguments, fit_held_back, profile_row, run_profile, write
from pengserve.simulator.timing.choose import profile_times
from pengserve.simulator.timing.steps import Batch
from tests.support.models import tiny_model
from tests.support.timed_steps import TRUE, samples

WISHES = Wishes(
    model="/models/mine", output=Path("mine.yaml"), name="mine", device="cpu", gpu=None, engine=(), num_batches=60,
    rounds=1, repetitions=1, seed=0,
)  # fmt: skip
FACTS = EngineFacts(
    device_name="cpu",
    capacity=KvCapacity(
        num_blocks=100, block_size=32, bytes_per_block=1 << 16, max_model_len=1024, max_num_seqs=64, weight_bytes=4000
    ),
    max_num_batched_tokens=512, layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, experts=0, value_bytes=4,
    kv_value_bytes=4,
)  # fmt: skip


def test_a_written_profile_is_read_as_it_was_fitted(tmp_path):
    fitted = fit_held_back([replace(sample, host_s=2e-3) for sample in samples()], seed=0)
    write(tmp_path / "mine.yaml", profile_row(WISHES, "cpu", {"dtype": "float32"}, FACTS, fitted), "mine")
    found = load_catalog(tmp_path / "mine.yaml").profile("mine")
    assert found.cost_model == fitted.costs
    assert found.model.weight_bytes == FACTS.capacity.weight_bytes
    assert found.kv_tokens == 3200
    whole_s = TRUE.batch_s([Chunk(prefix_tokens=99, num_tokens=1)] * 4)
    times = profile_times(found).times
    assert times.step_s(Batch(4, 400)) == pytest.approx(whole_s)
    assert times.stage(2).step_s(Batch(4, 400)) == pytest.approx(2e-3 + (whole_s - 2e-3) / 2)


def test_the_error_is_that_of_samples_that_the_fit_has_not_seen():
    good = fit_held_back(samples(), seed=0)
    order = list(range(60))
    random.Random(0).shuffle(order)
    spoiled = samples()
    spoiled[order[0]] = replace(spoiled[order[0]], seconds=9.0)  # one of those held back
    found = fit_held_back(spoiled, seed=0)
    assert found.costs == good.costs
    assert good.error < 1e-6 < found.error


def test_too_few_batches_are_one_sentence():
    with pytest.raises(ConfigError, match="raise --batches"):
        fit_held_back(samples(9), seed=0)


def test_settings_of_the_engine_are_yaml():
    found = engine_arguments(["dtype=float32", "max-model-len=4096", "enforce_eager=true"])
    assert found == {"dtype": "float32", "max_model_len": 4096, "enforce_eager": True}


@pytest.mark.parametrize("text", ["dtype", "=1", "a={"])
def test_a_setting_that_is_none_is_one_sentence(text):
    with pytest.raises(ConfigError, match="--engine"):
        engine_arguments([text])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"output": Path("/no/such/folder/mine.yaml")}, "make it first"),
        ({"device": "tpu"}, "take auto, cpu or cuda"),
        ({"gpu": "gaudi"}, "no GPU is called 'gaudi'"),
    ],
)
def test_wishes_that_cannot_be_met_are_told_before_anything_starts(change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run_profile(replace(WISHES, **change))


def test_a_device_is_named_or_found():
    assert find_device("cuda") == "cuda"
    assert find_device("auto") in ("cpu", "cuda")


@pytest.mark.slow
def test_an_engine_is_timed_and_its_profile_prices_steps(tmp_path, capsys):
    output = tmp_path / "tiny.yaml"
    engine = ("dtype=float32", "max_model_len=512", "max_num_seqs=16", "max_num_batched_tokens=256", "block_size=32")
    run_profile(replace(WISHES, model=str(tiny_model()), output=output, name="tiny", engine=engine))
    found = load_catalog(output).profile("tiny")
    assert found.gpu == "cpu"
    assert found.max_num_batched_tokens == 256
    assert 1e-4 < profile_times(found).times.step_s(Batch(4, 400)) < 1.0
    assert "held-back" in capsys.readouterr().out


@pytest.mark.validation
def test_an_engine_that_does_not_start_says_why(tmp_path):
    wishes = replace(WISHES, model=str(tiny_model()), output=tmp_path / "none.yaml", engine=("no_such_setting=1",))
    with pytest.raises(EngineError, match=r"no_such_setting"):
        run_profile(wishes)
