"""The `trace:` section: what may be written, what is made of it, and what is said about what may not."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.traces.config import GENERATORS, TraceConfig, build, parse
from pengserve.simulator.traces.generators.lengths import SampledLengths, UniformLengths
from pengserve.simulator.traces.generators.steady import Gamma
from pengserve.simulator.traces.loading import load
from pengserve.simulator.traces.transforms import clip, scale_rate, window
from pengserve.simulator.traces.upscale import upscale

UNIFORM = {"prompt": [5, 50], "output": [1, 20]}
SECTIONS: dict[str, str] = {
    "poisson": "{generator: poisson, rate_per_s: 5, duration_s: 30, lengths: {prompt: [5, 50], output: [1, 20]}}",
    "gamma": "{generator: gamma, rate_per_s: 5, duration_s: 30, cv: 2, lengths: {file: lengths.csv}}",
    "ramp": "{generator: ramp, points: [[0, 1], [30, 9]], lengths: {prompt: [5, 50], output: [1, 20]}}",
    "burstgpt": "{generator: burstgpt, rate_per_s: 1, kv_demand: {mean_tokens: 20000, tpot_s: 0.042}}",
    "extreme": "{generator: extreme, rate_per_s: 1, clip: 2048}",
    "flying": "{generator: flying, num_requests: 200, low_rate_per_s: [3, 4]}",
    "priority": "{generator: priority, duration_s: 60, degree: 2, max_requests: 50}",
    "multi_turn": "{generator: multi_turn, conversations_per_s: 1, duration_s: 30,"
    " lengths: {prompt_mean: 50, prompt_p99: 200, output_mean: 50, output_p99: 200}}",
    "file": "{file: trace.csv, window: [1, 9], rate_scale: 1.5}",
    "file with lengths": "{file: trace.csv, format: plain, lengths: {file: lengths.csv}, upscale: 2}",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = "".join(f"{i / 10},{i + 1},3\n" for i in range(100))
    (tmp_path / "trace.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{rows}")
    (tmp_path / "lengths.csv").write_text("num_prefill_tokens,num_decode_tokens\n30,4\n50,6\n")
    return tmp_path


def test_every_generator_is_tried_here() -> None:
    assert set(GENERATORS) < set(SECTIONS)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_makes_the_same_trace_every_time(name: str, folder: Path) -> None:
    config = parse(yaml.safe_load(SECTIONS[name]))
    trace = build(config, 3, folder)
    assert trace == build(config, 3, folder)
    assert len(trace) > 20


@pytest.mark.parametrize("name", SECTIONS)
def test_what_is_written_out_reads_as_the_same_section(name: str) -> None:
    config = parse(yaml.safe_load(SECTIONS[name]))
    assert parse(config.model_dump(mode="json")) == config
    assert "settings" not in config.model_dump(mode="json")


def test_a_generator_gets_its_own_fields(folder: Path) -> None:
    config = parse({"generator": "gamma", "rate_per_s": 5, "duration_s": 30, "cv": 2, "lengths": UNIFORM})
    wanted = Gamma(rate_per_s=5, duration_s=30, cv=2).generate(UniformLengths(prompt=(5, 50), output=(1, 20)), 4)
    assert build(config, 4, folder) == wanted


def test_steps_come_in_the_order_that_is_documented(folder: Path) -> None:
    data: dict[str, Any] = {"file": "trace.csv", "window": [2, 8], "clip": 40, "rate_scale": 0.9, "upscale": 2}
    trace = load(folder / "trace.csv")
    wanted = upscale(scale_rate(clip(window(trace, 2, 8), 40), 0.9, 5), 2, 5)
    assert build(parse({**data, "max_requests": 30}), 5, folder) == wanted[:30]


def test_a_file_may_take_the_lengths_of_another(folder: Path) -> None:
    trace = build(parse({"file": "trace.csv", "lengths": {"file": "lengths.csv"}}), 6, folder)
    assert [r.at_s for r in trace] == [r.at_s for r in load(folder / "trace.csv")]
    pairs = SampledLengths.from_file(folder / "lengths.csv").pairs
    assert {(r.prompt_tokens, r.output_tokens) for r in trace} == set(pairs)


def test_a_section_can_stand_within_a_larger_model() -> None:
    config = TraceConfig.model_validate({"generator": "flying"})
    assert TraceConfig.model_validate(config) is config


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({}, "give either file or generator"),
        ({"file": "a", "generator": "flying"}, "give either file or generator"),
        ({"generator": "poison"}, "generator must be one of poisson, gamma, .*, got 'poison'"),
        ({"generator": ["poisson"]}, r"generator must be one of .*, got \['poisson'\]"),
        ({"generator": "poisson", "duration_s": 3, "lengths": UNIFORM}, "rate_per_s is missing: give it"),
        ({"generator": "flying", "low_rate": [1, 2]}, "unknown key 'low_rate'; did you mean low_rate_per_s?"),
        ({"generator": "flying", "upscal": 2}, "unknown key 'upscal'; did you mean upscale?"),
        ({"generator": "flying", "low_s": "long"}, "low_s: input should be a valid number.*, got 'long'"),
        ({"generator": "flying", "low_s": -1}, "low_s must be a number above 0, got -1"),
        ({"generator": "flying", "step_s": 1}, "step_s is for files: leave it out beside generator 'flying'"),
        ({"generator": "flying", "settings": {}}, "unknown key 'settings'"),
        ({"generator": "poisson", "rate_per_s": 1, "duration_s": 3}, "generator 'poisson' has no lengths of its own"),
        ("trace.csv", "a trace must hold keys and values, such as `file: trace.csv`, got 'trace.csv'"),
        ({"file": "a", "windw": [1, 2]}, "unknown key 'windw'; did you mean window?"),
        ({"file": "a", "window": [2, 1]}, r"window: give \[start_s, stop_s\] with 0 <= start_s < stop_s"),
        ({"file": "a", "upscale": 0}, "upscale: input should be greater than 0, got 0"),
        ({"file": "a", "kv_demand": {"tpot_s": 1}}, "kv_demand.mean_tokens is missing: give it"),
        ({"file": "a", "lengths": 5}, "lengths: give {file}, {prompt, output} or"),
        ({"file": "a", "lengths": {"prompt": [1, 2]}}, "lengths: output is missing: give it"),
        ({"file": "a", "lengths": {"file": "b", "promt": 1}}, "lengths: unknown key 'promt'; known: file"),
        ({"file": "a", "lengths": {"prompt": [9, 2], "output": [1, 2]}}, "lengths: prompt must be two numbers above 0"),
    ],
)
def test_a_wrong_section_names_file_and_field(section: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        parse(section, source="run.yaml")
    assert str(error.value).endswith("(in run.yaml)")


def test_a_missing_trace_file_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*none\.csv"):
        build(parse({"file": "none.csv"}), 0, folder)
