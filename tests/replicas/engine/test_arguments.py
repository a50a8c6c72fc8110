"""Laws: the user's engine arguments win over defaults; what cannot work is refused in a sentence that names it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.multimodal.media import MediaConnector
from vllm.usage.usage_lib import UsageContext

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import ConfigError
from pengserve.replicas.comm.budget import communicator_bytes
from pengserve.replicas.engine.lanes import dp_lane
from pengserve.replicas.engine.lanes.dp_lane import engine_arguments
from pengserve.replicas.environment import process_environment

pytestmark = pytest.mark.slow


def arguments(model: Path | str, **engine: Any) -> dict[str, Any]:
    return engine_arguments(InstanceConfig(app="tests", model=str(model), engine=engine))


def test_defaults_give_way_to_the_user(tmp_path: Path) -> None:
    assert arguments(tmp_path)["enable_prefix_caching"] is True
    assert arguments(tmp_path, enable_prefix_caching=False)["enable_prefix_caching"] is False
    assert "kv_cache_memory_bytes" not in arguments(tmp_path, gpu_memory_utilization=0.5)


@pytest.mark.parametrize(("name", "value"), [("worker_cls", "mine"), ("max_modle_len", 5), ("data_parallel_size", 2)])
def test_arguments_that_cannot_work_are_named(tmp_path: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"engine\.{name}"):
        arguments(tmp_path, **{name: value})


OWN_CHOICE = {"additional_config", "disable_custom_all_reduce", "compilation_config", "async_scheduling"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_where_the_shape_never_changes_vllm_has_its_own_memory_sums_runner_and_scheduling(
    tmp_path: Path, device: str
) -> None:
    config = InstanceConfig(app="tests", model=str(tmp_path), device=device)
    given = engine_arguments(config)
    assert config.is_stock and not OWN_CHOICE & set(given)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in process_environment(config)
    assert ("enforce_eager" in given, "kv_cache_memory_bytes" in given) == (device == "cpu", device == "cpu")


@pytest.mark.parametrize(
    "changes", [{"degrees": (2,)}, {"max_stages": 2, "memory_bytes": 1 << 30}, {"memory_bytes": -1}, {"host_bytes": -1}]
)
def test_where_memory_or_shape_is_pengserve_s_the_runner_is_v1_and_a_host_tier_alone_ends_each_step_first(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = InstanceConfig(app="tests", model=str(tmp_path), device="cuda", **changes)
    assert not config.is_stock
    assert engine_arguments(config).get("async_scheduling") is (False if "host_bytes" in changes else None)
    assert process_environment(config)["VLLM_USE_V2_MODEL_RUNNER"] == "0"


def test_steps_are_as_large_as_those_of_vllm_serve(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's defaults for a step go by who asks: on an H100 other programs get a quarter of a server's tokens."""
    h100 = SimpleNamespace(get_device_total_memory=lambda: 80 << 30, get_device_name=lambda: "NVIDIA H100 80GB HBM3")
    for name in ("is_cpu", "is_tpu", "is_xpu", "is_rocm"):
        setattr(h100, name, lambda: False)
    tokens, requests = {}, {}

    class Asked(Exception):
        """The engine's configuration was asked for; the model is not loaded."""

    def create(self: Any, context: UsageContext) -> None:
        for defaults, found in zip(self.get_batch_defaults(1), (tokens, requests), strict=True):
            found.update(defaults)
        raise Asked(context)

    with monkeypatch.context() as patch, pytest.raises(Asked) as asked:
        patch.setattr("vllm.engine.arg_utils.current_platform", h100)
        patch.setattr(dp_lane.AsyncEngineArgs, "create_engine_config", create)
        dp_lane.DpLane(InstanceConfig(app="tests", model=str(model)))
    [context] = asked.value.args
    assert (tokens[context], requests[context]) == (8192, 1024)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        arguments(tmp_path / "nowhere")


def test_one_backend_guides_all_requests_of_all_instances(tmp_path: Path) -> None:
    assert arguments(tmp_path)["structured_outputs_config"].backend == "xgrammar"
    given = {"backend": "guidance", "disable_additional_properties": True}
    assert arguments(tmp_path, structured_outputs_config=given)["structured_outputs_config"].backend == "guidance"
    with pytest.raises(ConfigError, match=r"engine\.structured_outputs_config"):
        arguments(tmp_path, structured_outputs_config={"backend": "mine"})


def test_an_engine_with_workers_has_them_in_processes_that_share_its_memory(tmp_path: Path) -> None:
    """vLLM itself would choose Ray in the placement group of an instance, and wait for GPUs that the instance has."""
    assert "distributed_executor_backend" not in arguments(tmp_path)
    assert arguments(tmp_path, tensor_parallel_size=2)["distributed_executor_backend"] == "mp"
    assert arguments(tmp_path, pipeline_parallel_size=2)["distributed_executor_backend"] == "mp"
    assert arguments(tmp_path, tensor_parallel_size=2, distributed_executor_backend="x") == (
        arguments(tmp_path, tensor_parallel_size=2) | {"distributed_executor_backend": "x"}
    )
    config = InstanceConfig(
        app="tests", model=str(tmp_path), engine={"tensor_parallel_size": 2}, memory_bytes=1 << 30, device="cuda"
    )
    given = engine_arguments(config)
    assert given["kv_cache_memory_bytes"] == given["additional_config"]["pengserve_memory"]["memory_bytes"] == 1 << 29


@pytest.mark.parametrize(("device", "kv_bytes"), [("cuda", None), ("cpu", 1)])
def test_vllm_looks_what_is_free_where_it_can_tell(tmp_path: Path, device: str, kv_bytes: int | None) -> None:
    config = InstanceConfig(
        app="tests", model=str(tmp_path), memory_bytes=-1, degrees=(2, 4), max_stages=2, device=device
    )
    given = engine_arguments(config)
    assert given["kv_cache_memory_bytes"] == kv_bytes
    assert given["additional_config"]["pengserve_shapes"] == 3
    memory = given["additional_config"]["pengserve_memory"]
    assert memory["is_gradual"] == (device == "cuda")
    assert memory["communicator_bytes"] == (communicator_bytes((2, 4), 2) if device == "cuda" else 0)
    by_tcp = engine_arguments(replace(config, communicator="direct"))["additional_config"]["pengserve_memory"]
    assert by_tcp["communicator_bytes"] == 0


def test_media_are_fetched_from_nowhere_until_a_domain_is_named(tmp_path: Path) -> None:
    connector = MediaConnector(allowed_media_domains=arguments(tmp_path)["allowed_media_domains"])
    for url in ("http://127.0.0.1:1/x.png", "http://169.254.169.254/latest", "https://example.org/x.png"):
        with pytest.raises(ValueError, match="allowed_media_domains-is-set"):
            connector.fetch_image(url)
    given = ["images.example.org"]
    assert arguments(tmp_path, allowed_media_domains=given)["allowed_media_domains"] == given
