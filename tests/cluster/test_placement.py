"""Laws: on any number of devices the settings give a plan that can serve, or one sentence; never a loop of starts."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pengserve.cluster import placement
from pengserve.cluster.cli import up
from pengserve.cluster.cli.doctor import Level, examine
from pengserve.cluster.cli.main import main
from pengserve.cluster.placement import Devices, cluster_devices, remarks, settle
from pengserve.cluster.settings import Settings
from pengserve.cluster.settings_sources import parse_settings
from pengserve.planners.types.errors import ConfigError

SERVE = Path(__file__).parents[2] / "deploy" / "serve.yaml"
EXPERIMENTAL = {"shape": {"cuda": "experimental"}}
PAIRS = {"engine": {"tensor_parallel_size": 2}}
TWO = {"instances": {"count": 2}}


def serve_args(*changes: dict[str, Any]) -> dict[str, Any]:
    """`args` of deploy/serve.yaml, with changes by section."""
    args: dict[str, Any] = yaml.safe_load(SERVE.read_text())["applications"][0]["args"]
    for change in changes:
        for section, values in change.items():
            args[section] = {**args.get(section, {}), **values}
    return args


def on(*by_node: float) -> Devices:
    """Devices that a test pretends there are."""
    return Devices(where="on this machine", by_node=by_node)


def plan(args: dict[str, Any], devices: Devices) -> Settings:
    """What is deployed. Every figure that instances and controller start with can be had of it."""
    settings = settle(parse_settings(args), lambda: devices)
    instance, controller = settings.instance_config(""), settings.controller_config()
    assert controller.num_instances == settings.num_instances == settings.instances.count
    assert (instance.degrees, instance.max_stages) == (controller.degrees, controller.drop.max_stages)
    assert sum(int(n // controller.gpus_per_instance) for n in devices.by_node) >= controller.num_instances
    return settings


@pytest.mark.parametrize(
    ("changes", "devices", "count", "degrees", "gpus"),
    [
        ((), on(1), 1, (), 1),
        ((), on(2), 2, (), 1),
        ((), on(8), 8, (), 1),
        ((), on(8, 8, 0), 16, (), 1),
        ((EXPERIMENTAL,), on(1), 1, (), 1),
        ((EXPERIMENTAL,), on(2), 2, (2,), 1),
        ((EXPERIMENTAL,), on(8), 8, (2, 4, 8), 1),
        ((PAIRS,), on(2), 1, (), 2),
        ((PAIRS,), on(8), 4, (), 2),
        ((PAIRS,), on(3, 1), 1, (), 2),  # an instance has its devices on one machine
        ((PAIRS, EXPERIMENTAL), on(8), 4, (), 2),
        ((TWO,), on(2), 2, (), 1),
        ((TWO,), on(8), 2, (), 1),
        ((TWO, {"instances": {"gpus": 0.5}}), on(1), 2, (), 0.5),
    ],
)
def test_serve_yaml_gives_a_plan(changes: Any, devices: Devices, count: int, degrees: Any, gpus: float) -> None:
    settings = plan(serve_args(*changes), devices)
    assert (settings.num_instances, settings.degrees, settings.gpus_per_instance) == (count, degrees, gpus)
    assert len(remarks(settings)) == 1


@pytest.mark.parametrize(
    ("changes", "devices", "sentence"),
    [
        ((), on(0), "instances.count is auto, and 0 CUDA devices are visible on this machine: make devices visible"),
        ((), on(), "instances.count is auto, and 0 CUDA devices are visible on this machine: make devices visible"),
        ((TWO,), on(0), "instances.count is 2, and 0 CUDA devices are visible on this machine: make devices visible"),
        (
            (TWO,),
            on(1),
            "instances.count is 2, and 1 CUDA device is visible on this machine: set instances.count to auto or to 1"
            " at most",
        ),
        (
            (PAIRS,),
            on(1),
            "instances.count is auto, an instance needs 2 CUDA devices of one machine (engine.tensor_parallel_size),"
            " and 1 CUDA device is visible on this machine: lower engine.tensor_parallel_size",
        ),
        (
            (PAIRS, TWO),
            on(2, 1),
            "instances.count is 2, and 3 CUDA devices are visible on this machine for instances of 2: set"
            " instances.count to auto or to 1 at most",
        ),
        ((EXPERIMENTAL, {"shape": {"degrees": [4]}}), on(2), "a group of 4 needs as many instances"),
    ],
)
def test_or_one_sentence(changes: Any, devices: Devices, sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan(serve_args(*changes), devices)
    assert sentence in str(refusal.value) and "\n" not in str(refusal.value)


def test_on_cpus_nothing_is_asked_and_auto_means_two() -> None:
    def ask() -> Devices:
        raise AssertionError("a device was asked for")

    settings = settle(parse_settings({"model": "m", "instances": {"device": "cpu"}}), ask)
    assert (settings.instances.count, settings.degrees, remarks(settings)) == (2, (2,), ())


def test_devices_that_come_later_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_POLL_PERIOD_S", 0.0)
    answers = iter([on(0), on(1), on(1, 1), on(1, 1, 1)])
    settings = settle(parse_settings(serve_args(TWO)), lambda: next(answers), patience_s=60)
    assert settings.num_instances == 2
    assert next(answers).total == 3, "it was asked once too often"


def test_without_an_answer_a_number_counts_and_auto_is_refused() -> None:
    assert settle(parse_settings(serve_args(TWO)), cluster_devices).num_instances == 2  # no Ray in this process
    with pytest.raises(ConfigError, match=r"Ray cluster cannot be asked .* set instances\.count to the number"):
        settle(parse_settings(serve_args()), cluster_devices)


# `pengserve up` and `doctor` on a pretended machine -----------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of settings like the arguments of deploy/serve.yaml, with two instances."""
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "config.yaml"
    # A local model: `up` would first refuse a hub name where no hub is reached.
    path.write_text(yaml.safe_dump({**serve_args(TWO), "model": "demo", "http": {"port": 18999}}))
    return path


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets how many devices this machine has."""
    return lambda count: monkeypatch.setattr(placement, "count_cuda_devices", lambda: count)


def test_up_refuses_before_it_starts_anything(
    config: Path, pretend: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a Ray cluster was started")

    monkeypatch.setattr(up.ray_local, "local_ray", start)
    pretend(1)
    with pytest.raises(SystemExit) as end:
        main(["up", str(config)])
    err = capsys.readouterr().err
    assert (end.value.code, err.count("\n")) == (1, 1)
    assert "instances.count is 2, and 1 CUDA device is visible on this machine" in err


def test_up_detached_refuses_before_it_deploys(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deploy(*_: object) -> None:
        raise AssertionError("it was deployed")

    monkeypatch.setattr(up.ray_local, "join_ray", lambda: None)
    monkeypatch.setattr(up.ray_local, "deploy", deploy)
    monkeypatch.setattr(up, "cluster_devices", lambda: Devices(where="in the Ray cluster", by_node=(1.0,)))
    with pytest.raises(ConfigError, match=r"instances\.count is 2, and 1 CUDA device is visible in the Ray cluster"):
        up.run_detached(parse_settings(yaml.safe_load(config.read_text())), 1)


@pytest.mark.parametrize(("count", "level"), [(0, Level.FAIL), (1, Level.FAIL), (2, Level.OK), (8, Level.OK)])
def test_doctor_looks_at_the_devices(config: Path, pretend: Any, count: int, level: Level) -> None:
    pretend(count)
    findings = list(examine(config, None, None))
    (found,) = [finding for finding in findings if finding.subject == "devices"]
    assert found.level is level
    assert "instances.count is 2" in found.text or level is Level.OK
    assert [f.text for f in findings if f.subject == "shape"] == list(remarks(parse_settings(serve_args())))
