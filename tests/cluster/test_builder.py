"""The Serve builder, as `serve deploy` runs it, on a Ray cluster with pretended GPUs: a plan or a refusal."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm")
import ray

from pengserve.cluster.placement import cluster_devices
from pengserve.planners.types.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVE = Path(__file__).parents[2] / "deploy" / "serve.yaml"


@pytest.fixture(scope="module")
def three_gpus() -> Iterator[None]:
    ray.init("local", num_cpus=1, num_gpus=3, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def _build(args: dict[str, Any]) -> tuple[int, list[int], float]:
    """What the builder has the controller start."""
    from pengserve.cluster.app import build

    (actor,) = build(args)._bound_deployment._deployment_config.deployment_actors
    config = actor.init_kwargs["config"]
    return config["num_instances"], config["degrees"], config["gpus_per_instance"]


def build_as_serve_does(args: dict[str, Any]) -> tuple[int, list[int], float]:
    """In a task of the cluster."""
    return ray.get(ray.remote(num_cpus=0)(_build).remote(args), timeout=120)


def serve_args() -> dict[str, Any]:
    args: dict[str, Any] = yaml.safe_load(SERVE.read_text())["applications"][0]["args"]
    return args


def test_the_cluster_is_asked(three_gpus: None) -> None:
    assert cluster_devices().by_node == (3.0,)
    assert build_as_serve_does(serve_args()) == (3, [], 1.0)
    args = serve_args()
    args["engine"]["tensor_parallel_size"] = 2
    assert build_as_serve_does(args) == (1, [], 2.0)


def test_more_instances_than_the_cluster_has_devices_are_refused(three_gpus: None) -> None:
    args = serve_args()
    args["instances"]["count"] = 4
    with pytest.raises(ConfigError, match=r"instances\.count is 4, and 3 CUDA devices are visible in the Ray cluster"):
        build_as_serve_does(args)
