"""Instances that schedule a step before the last one has ended, as on a GPU, and that change their shape meanwhile.

No step is under way while a shape, memory or KV changes: tokens are those that each request gives undisturbed.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pengserve.planners.types.strategy import SwitchStrategy
from tests.support import ahead_host
from tests.support.disturbed import Disturbed
from tests.support.elastic import ElasticCluster, started
from tests.support.traffic import Traffic

pytestmark = pytest.mark.shapes

MEMORY_BYTES = 24 << 20  # of an instance: 3 MiB of weights, and KV that all requests fit into


@pytest.fixture(scope="module")
def disturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disturbed]:
    """Two instances; in the end each has scheduled ahead."""
    folder = tmp_path_factory.mktemp("ahead")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ahead_host.VARIABLE, str(folder))
        cluster = ElasticCluster(
            model, 2, max_stages=2, memory_bytes=MEMORY_BYTES, host_module="tests.support.ahead_host"
        )
        with started(cluster), cluster.ingress() as url, Traffic(url) as traffic:
            yield Disturbed(cluster, traffic, count=12, max_tokens=60)
            pids = [cluster.pid(i) for i in range(2)]
    for pid in pids:
        num_ahead, runner = ahead_host.notes_of(folder, pid)
        assert num_ahead >= ahead_host.NOTE_EVERY and runner == "vllm.v1.worker.cpu_model_runner", (num_ahead, runner)


@pytest.mark.parametrize("shape", ["tp2", "pp2"])
@pytest.mark.parametrize("strategy", SwitchStrategy)
def test_tokens_are_equal_through_a_shape_and_back(disturbed: Disturbed, shape: str, strategy: SwitchStrategy) -> None:
    disturbed.there_and_back(shape, strategy.value)


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_equal_through_any_sequence(disturbed: Disturbed, seed: int) -> None:
    disturbed.at_random(seed, num_rounds=10, pause_s=0.3)


def test_tokens_are_equal_where_requests_migrate(disturbed: Disturbed) -> None:
    assert disturbed.to_and_fro() > 0
