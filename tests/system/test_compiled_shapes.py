"""Laws of lanes whose models vLLM compiles: the tokens of `dp`, and no step of any lane compiles anything."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.compile_host import VARIABLE, notes_of
from tests.support.disturbed import Disturbed
from tests.support.elastic import elastic_cluster
from tests.support.traffic import Traffic

MEMORY_BYTES = 24 << 20  # of an instance: 3 MiB of weights, and KV that all requests fit into
pytestmark = [pytest.mark.slow, pytest.mark.shapes]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module", params=[pytest.param("compile_host", marks=pytest.mark.faults), "graph_host"])
def compiled(request: pytest.FixtureRequest, model: Any, notes: Path) -> Iterator[Disturbed]:
    """A cluster whose models are compiled; and one that captures graphs, as on CUDA, for which a CPU stands."""
    with disturbed(model, 2, request.param, notes) as found:
        yield found


@contextmanager
def disturbed(model: Any, num_instances: int, host: str, notes: Path) -> Iterator[Disturbed]:
    """A cluster of instances that `host` runs, with groups of all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(notes))
        with (
            elastic_cluster(
                model,
                num_instances,
                degrees=(num_instances,),
                max_stages=num_instances,
                max_in_flight=2,
                memory_bytes=MEMORY_BYTES,
                engine={"enforce_eager": False},
                host_module=f"tests.support.{host}",
            ) as cluster,
            cluster.ingress() as url,
            Traffic(url) as traffic,
        ):
            yield Disturbed(cluster, traffic, count=12, max_tokens=40)


@pytest.mark.faults  # with the full matrix: four instances compile for minutes on two cores
def test_tokens_are_those_of_dp_in_groups_of_four(model: Any, tmp_path: Path) -> None:
    with disturbed(model, 4, "graph_host", tmp_path) as found:
        for shape in ("tp4", "pp4"):
            found.there_and_back(shape, "carry")


@pytest.mark.parametrize("shape", ["tp2", "pp2"])
@pytest.mark.parametrize("strategy", ["carry", "hard"])
def test_tokens_are_those_of_dp_both_ways(compiled: Disturbed, shape: str, strategy: str) -> None:
    compiled.there_and_back(shape, strategy)


def test_no_step_compiles_anything_nor_does_a_lane_that_is_built_again(
    compiled: Disturbed, notes: Path, request: pytest.FixtureRequest
) -> None:
    """The second member is killed, so that the first one's lane breaks and is built again. What takes its place finds
    all shapes in vLLM's cache, which has only models that are cut into pieces for graphs.
    """
    cluster = compiled.cluster
    for shape in ("pp2", "tp2"):
        cluster.set_layout(shape)
        compiled.check_all([(i, compiled.traffic.start(**compiled.requests[i])) for i in range(6)])
    running = [(i, compiled.traffic.start(**request)) for i, request in enumerate(compiled.requests)]
    time.sleep(0.2)
    survivor = cluster.pid(0)
    os.kill(cluster.pid(1), signal.SIGKILL)
    compiled.check_all(running)
    cluster.wait_formable()
    cluster.set_layout("tp2")
    compiled.check_all([(i, compiled.traffic.start(**compiled.requests[i])) for i in range(6)])
    cluster.set_layout("dp")
    ready, *others = notes_of(notes, survivor)
    assert ready["what"] == "ready" and ready["count"] >= 3, "dp, tp2 and pp2"
    assert {(note["what"], note["lane"]) for note in others} >= {("left", "pp2"), ("left", "tp2"), ("rebuilt", "tp2")}
    assert {note["count"] for note in others} == {ready["count"]}, others
    if "graph" in request.node.name:
        successor = notes_of(notes, cluster.pid(1))[0]
        assert successor["what"] == "ready" and successor["num_loaded"] >= 3, "dp, tp2 and pp2"
        replayed = [note["num_replayed"] for note in others if note["what"] == "left"]
        assert replayed == sorted(set(replayed)) and replayed[0] > 0, "each lane replays graphs"
