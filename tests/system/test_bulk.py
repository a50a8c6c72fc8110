"""Laws of pipelines whose KV and weights go by the ways of their group, over gloo; on CUDA the same goes over NCCL."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pengserve.planners.types.events import EventKind
from tests.support.bulk_host import VARIABLE, num_bytes
from tests.support.disturbed import Disturbed
from tests.support.elastic import elastic_cluster
from tests.support.traffic import TimedStream, Traffic
from tests.support.waiting import until

MEMORY_BYTES = 24 << 20  # of an instance: 3 MiB of weights, and KV that all requests fit into
pytestmark = [pytest.mark.slow, pytest.mark.shapes]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bulk")


@pytest.fixture(scope="module")
def disturbed(model: Path, folder: Path) -> Iterator[Disturbed]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder))
        with (
            elastic_cluster(
                model,
                2,
                degrees=(),
                max_stages=2,
                max_in_flight=2,
                memory_bytes=MEMORY_BYTES,
                communicator="gloo",
                host_module="tests.support.bulk_host",
            ) as cluster,
            cluster.ingress() as url,
            Traffic(url) as traffic,
        ):
            yield Disturbed(cluster, traffic, count=12, max_tokens=150)  # they run while the shape changes


@pytest.mark.parametrize("strategy", ["carry", "hard"])
def test_tokens_are_those_of_dp_through_a_drop_and_a_restore(disturbed: Disturbed, folder: Path, strategy: str) -> None:
    """KV of what runs goes by the ways after the drop, and half of each member's weights before the restore."""
    cluster, before = disturbed.cluster, num_bytes(folder)
    live = [TimedStream() for _ in disturbed.requests]
    running = [(i, disturbed.traffic.start(**r, into=live[i])) for i, r in enumerate(disturbed.requests)]
    until(lambda: sum(bool(stream.token_ids) for stream in live) > 4)
    cluster.set_layout("pp2", strategy)
    assert cluster.events(EventKind.TRANSITION_END)[-1].data["num_carried"] > 0
    disturbed.check_memory()
    cluster.require_layout("pp2")
    cluster.set_layout("dp", strategy)
    disturbed.check_memory()
    disturbed.check_all(running)
    weight_bytes = cluster.snapshot().instances[0].capacity.weight_bytes  # type: ignore[union-attr]
    assert num_bytes(folder) - before > weight_bytes // 2


def test_the_death_of_a_member_costs_no_stream_and_its_successor_has_ways_again(
    disturbed: Disturbed, folder: Path
) -> None:
    cluster = disturbed.cluster
    running = [(i, disturbed.traffic.start(**request)) for i, request in enumerate(disturbed.requests)]
    cluster.set_layout("pp2")
    os.kill(cluster.pid(1), signal.SIGKILL)
    disturbed.check_all(running)
    cluster.wait_formable()
    before = num_bytes(folder)
    disturbed.there_and_back("pp2", "carry")
    assert num_bytes(folder) > before
