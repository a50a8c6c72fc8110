"""Bad configurations: one sentence that names the field, and the file where there is one."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.config import ClusterConfig, SimulationConfig
from pengserve.simulator.policies.registry import POLICIES
from pengserve.simulator.run import simulate
from tests.simulator.machines import poisson

CLUSTER = {"gpu": "a100", "model": "qwen2.5-14b"}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"cluster": {**CLUSTER, "instance": 4}}, "cluster.instance is no known field: did you mean instances?"),
    ({"cluster": {**CLUSTER, "instances": 0}}, "cluster.instances: "),
    ({"cluster": {"gpu": "a100"}}, "cluster: give either gpu and model, or profile"),
    ({"cluster": {**CLUSTER, "gpu": "a101"}}, "no GPU is called 'a101'; near it are "),
    ({"cluster": {**CLUSTER, "model": "qwen2.5-15b"}}, "no model is called 'qwen2.5-15b'; near it are "),
    ({"cluster": {**CLUSTER, "degrees": [3]}}, "cluster.degrees: give powers of two"),
    ({"cluster": {**CLUSTER, "degrees": [4]}}, "cluster.degrees asks for groups of 4 instances"),
    ({"cluster": {**CLUSTER, "max_stages": 4}}, "cluster.max_stages asks for groups of 4 instances"),
    ({"cluster": {**CLUSTER, "instances": 64, "max_stages": 64}}, "lower cluster.max_stages"),
    ({"cluster": {**CLUSTER, "model": "llama3-70b"}}, "llama3-70b on A100-80-SXM does not fit in dp"),
    ({"cluster": {**CLUSTER, "max_model_len": 10_000_000}}, "cluster.max_model_len is 10000000"),
    ({"cluster": {**CLUSTER, "links": {"wifi": 1}}}, "cluster.links: give bytes per second"),
    ({"cluster": {**CLUSTER, "max_num_batched_tokens": 64}}, "max_num_batched_tokens (64) must be at least"),
    ({"cluster": {**CLUSTER, "gpus_per_instance": 3}}, "gpus_per_instance (3) must divide gpus_per_node (8)"),
    ({"policy": {"name": "pengserv"}}, 'there is no policy "pengserv": did you mean pengserve?'),
    ({"policy": {"options": {"degree": 2}}}, "policy.options.degree is no known field"),
    ({"policy": {"options": {"drop": {"quiet": 2}}}}, "policy.options.drop.quiet is no known field"),
    ({"policy": {"options": {"merge": {"is_auto": 1}}}}, "policy.options.merge.is_auto must be true or false"),
    (
        {"policy": {"options": {"merge": {"split_above": 0.2}}}},
        "policy.options.merge.split_above (0.2) must be above merge_below (0.25)",
    ),
    (
        {"policy": {"options": {"drop": {"target": 0.99}}}},
        "policy.options.drop.target (0.99) must not be above drop_above (0.95)",
    ),
    ({"policy": {"name": "vllm_tp", "options": {"degree": 4}}}, "policy.options.degree is 4"),
    ({"policy": {"name": "vllm_pp", "options": {"stages": 3}}}, "policy.options.stages: give a power of two"),
    ({"policy": {"name": "migration", "options": {"full_above": 0.2}}}, "free_below (0.6) must not be above"),
    ({"policy": {"name": "swap"}, "scheduler": "vllm"}, "scheduler is vllm, which has no swapping"),
    ({"deaths": [{"instance": 2, "at_s": 1}]}, "deaths name instance 2, and the instances are 0 to 1"),
    ({"layouts": [{"layout": "tp2", "at_s": 1}]}, "layouts: "),
    ({"trace": {"generator": "poison"}}, "trace: generator must be one of"),
    ({"trace": None}, "trace is missing"),
    ({"sample_s": "often"}, "sample_s: "),
]


@pytest.mark.parametrize(("given", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_a_bad_field_is_named_in_one_sentence(given: dict[str, Any], sentence: str) -> None:
    trace = {
        "generator": "poisson",
        "rate_per_s": 1,
        "duration_s": 5,
        "lengths": {"prompt": [9, 99], "output": [9, 99]},
    }
    with pytest.raises(ConfigError) as caught:
        simulate(SimulationConfig.parse({"cluster": CLUSTER, "scheduler": "fast", "trace": trace, **given}))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_two_requests_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="same id"):
        simulate(SimulationConfig.parse({"cluster": CLUSTER}), [*poisson(2, 1), *poisson(2, 1)])


@pytest.mark.parametrize(
    ("text", "sentence"), [("a: [", "is not YAML in line 1"), ("7", "must be a mapping"), ("seed: x", "(in {path})")]
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        SimulationConfig.load(path)
    assert str(path) in str(caught.value) and sentence.format(path=path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*gone\.yaml"):
        SimulationConfig.load(tmp_path / "gone.yaml")


def test_the_small_scenario_drops_while_that_pays() -> None:
    """Memory stays short by what dp serves: P99 TTFT is 26 s there, and below 1 s with the drop."""
    path = Path(__file__).parents[2] / "simulator" / "scenarios" / "small.yaml"
    result = simulate(SimulationConfig.load(path))
    switched = [event.data["switch"] for event in result.events if event.kind == "transition_end"]
    assert switched[:1] == ["drop"] and not any(outcome.refused for outcome in result.outcomes)
    assert sorted(outcome.ttft_s or 1e9 for outcome in result.outcomes)[-6] < 2.0


def test_a_larger_gpu_holds_more() -> None:
    held = []
    for gpu in ("a100", "h200"):
        config = SimulationConfig.parse(
            {"cluster": {**CLUSTER, "gpu": gpu}, "policy": {"name": "vllm_dp"}, "scheduler": "fast"}
        )
        held.append(simulate(config, poisson(3, 1)).moments[0].held_tokens)
    assert held[0] < held[1]


def test_prefixes_that_nobody_finds_are_told() -> None:
    cluster = {**CLUSTER, "prefix_caching": True}
    config = SimulationConfig.parse({"cluster": cluster, "policy": {"name": "vllm_dp"}, "scheduler": "fast"})
    assert "No prefix is cached: the fast scheduler knows none." in simulate(config, poisson(2, 1)).assumptions


def test_progress_is_told_and_grows() -> None:
    config = SimulationConfig.parse({"cluster": CLUSTER, "policy": {"name": "vllm_dp"}, "scheduler": "fast"})
    seen = []
    simulate(config, poisson(20, 2), seen.append)
    assert [p.num_ended for p in seen] == sorted(p.num_ended for p in seen) and seen[-1].num_requests == 20


@pytest.mark.parametrize("kind", [SimulationConfig, ClusterConfig, *POLICIES.values()])
def test_every_field_is_in_the_manual(kind: type[BaseModel]) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "simulation-config.md").read_text()
    assert [name for name in kind.model_fields if f"`{name}`" not in manual and name != "folder"] == []
