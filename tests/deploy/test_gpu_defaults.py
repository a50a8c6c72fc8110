"""Law: no configuration of `deploy/`, nor the defaults of `pengserve up`, raises at the start on a machine with GPUs.

Machines with 1, 2 and 8 of them are pretended: NVIDIA's tool says what was recorded. From the settings follow the
configuration, the groups, the layouts and the plans, as a controller and instances would make them.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pengserve.cluster.forecast import ModelFacts, forecast_shapes, missing_bytes
from pengserve.cluster.gpus import look_for_gpus
from pengserve.cluster.placement import local_devices, remarks, settle
from pengserve.cluster.preflight import setting_mistakes
from pengserve.cluster.settings import Settings
from pengserve.cluster.settings_sources import load_settings, parse_settings
from pengserve.planners.check import check_switch
from pengserve.planners.groups import complete, expand
from pengserve.planners.selector import SelectorHistory, select
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.snapshot import Demand
from tests.planners.clusters import NUM_BLOCKS, snapshot, stats
from tests.support.nvidia import COUNTS, pretend

DEPLOY = Path(__file__).parents[2] / "deploy"
QWEN3_4B = ModelFacts(
    weight_bytes=8 << 30, num_layers=36, num_heads=32, num_kv_heads=8, token_bytes=147_456, max_len=16_384
)
ELASTIC = {"shape": {"cuda": "experimental", "drop": {"max_stages": 2}}, "instances": {"memory_bytes": "auto"}}


def arguments(name: str) -> dict[str, Any]:
    """PengServe's part of a file; of `up`, that of its command line."""
    if name == "up":
        return {"model": "Qwen/Qwen3-4B", "served_model_name": "qwen3-4b"}
    document = next(iter(yaml.safe_load_all((DEPLOY / name).read_text())))
    if name == "kuberay.yaml":
        document = yaml.safe_load(document["spec"]["serveConfigV2"])
    return dict(document["applications"][0]["args"] if "applications" in document else document)


def with_changes(data: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(data)
    for key, value in changes.items():
        merged[key] = with_changes(merged.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def settled(name: str, count: int, changes: dict[str, Any]) -> Settings:
    """The settings on this machine, as `up` and the Serve builder have them before anything starts."""
    settings = parse_settings(with_changes(arguments(name), changes))
    return settle(settings, local_devices)


def check(settings: Settings, count: int) -> None:
    """Everything that is made of settings before an engine is."""
    assert not [mistake for mistake in setting_mistakes(settings) if "keys" not in mistake]
    instance, controller = settings.instance_config("token"), settings.controller_config()
    num_instances = controller.num_instances
    gpus = look_for_gpus()
    if settings.device == "cuda":
        assert gpus is not None and num_instances * settings.gpus_per_instance <= len(gpus.found) == count
        assert missing_bytes(settings, QWEN3_4B, gpus)[0] < 0
    assert not [found for found in forecast_shapes(settings, QWEN3_4B, gpus) if found.why_not]
    assert instance.degrees == controller.degrees and all(degree <= num_instances for degree in instance.degrees)
    assert all(isinstance(remark, str) for remark in remarks(settings))

    ranks = tuple(map(InstanceId, range(num_instances)))
    rest = snapshot(num_instances, degrees=controller.degrees, max_stages=controller.drop.max_stages)
    for text in ("dp", *(f"tp{degree}" for degree in controller.degrees), "pp2" * (controller.drop.max_stages > 1)):
        groups = complete(expand(text, rest.groups, ranks), ranks) if text else ()
        assert sorted(member for group in groups for member in group.members) == (list(ranks) if text else [])
    full = {i: stats("dp", requests=8, blocks=NUM_BLOCKS, waiting=4) for i in ranks}
    wish = Demand(num_running=1, wanted_degrees=((2, 1),)) if controller.degrees else None
    for seen in (rest, replace(rest, demands=(wish,)) if wish else rest, replace(rest, instances=loaded(rest, full))):
        plan, _, _ = select(seen, controller.merge, controller.drop, SelectorHistory())
        assert plan is None or check_switch(plan, seen) == ()


def loaded(seen: Any, loads: dict[InstanceId, Any]) -> tuple[Any, ...]:
    return tuple(replace(instance, stats=loads[instance.key.instance_id]) for instance in seen.instances)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("changes", [{}, ELASTIC], ids=["as it is", "elastic"])
@pytest.mark.parametrize("name", ["up", "serve.yaml", "kuberay.yaml", "laptop.yaml", "serve-cpu.yaml"])
def test_the_defaults_start_on_any_machine(
    name: str, changes: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if name == "kuberay.yaml" and count < 2:
        pytest.skip("the file itself asks for two workers with a GPU each")
    pretend(monkeypatch, tmp_path, count)
    is_cpu = name in ("laptop.yaml", "serve-cpu.yaml")
    if changes and (is_cpu or (count < 2 and name != "kuberay.yaml")):
        changes = {**changes, "shape": {"cuda": "experimental"}}  # one instance has no pipeline
    if is_cpu and changes:
        pytest.skip("for CPUs alone")
    settings = settled(name, count, changes)
    check(settings, count)
    if not is_cpu and name != "kuberay.yaml":
        assert settings.num_instances == count, "every visible device serves"


@pytest.mark.slow  # it imports vLLM
@pytest.mark.parametrize("changes", [{}, ELASTIC], ids=["as it is", "elastic"])
@pytest.mark.parametrize("name", ["up", "serve.yaml", "kuberay.yaml"])
def test_vllm_knows_every_argument_of_the_defaults(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dp_lane = pytest.importorskip("pengserve.replicas.engine.lanes.dp_lane")
    pretend(monkeypatch, tmp_path, 2)
    given = dp_lane.engine_arguments(settled(name, 2, changes).instance_config("token"))  # raises where it does not
    assert given.get("kv_cache_memory_bytes") is None, "vLLM looks what is free"
    assert ("pengserve_memory" in given.get("additional_config", {})) == bool(changes)


@pytest.mark.parametrize("count", COUNTS)
def test_a_second_worker_in_an_engine_halves_the_instances(
    count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, tmp_path, count)
    settings = load_settings(None, model="Qwen/Qwen3-4B", engine={"tensor_parallel_size": 2})
    if count > 1:
        assert settle(settings, local_devices).num_instances == count // 2
