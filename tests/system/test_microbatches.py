"""How the work of a pipeline becomes microbatches changes no token, and stages tell how long they computed."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from pengserve.planners.types.config import MicrobatchPolicy
from tests.support.disturbed import Disturbed
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.traffic import Traffic
from tests.system.test_shape_exactness import MEMORY_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

ENGINE = {"scheduling_policy": "priority"}  # requests have several: microbatches read the urgent prompts first
HEARD_S = 0.5  # until the controller has asked every instance again
PAUSE_S = 3.0  # without work; far above what the stages of one request wait for each other


WAYS: list[dict[str, Any]] = [{"microbatches": MicrobatchPolicy.TOKENS}, {"max_in_flight": 1}]


@pytest.fixture(scope="module", params=WAYS, ids=["by_tokens", "one_at_a_time"])
def formed(request: pytest.FixtureRequest, model: Any) -> Iterator[Disturbed]:
    with (
        elastic_cluster(
            model, 2, degrees=(), max_stages=2, memory_bytes=MEMORY_BYTES, engine=ENGINE, **request.param
        ) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        found = Disturbed(cluster, traffic, count=12, max_tokens=40)
        for index, sent in enumerate(found.requests):
            sent["priority"] = index % 3 - 1
        yield found


def test_each_way_gives_the_tokens_of_dp_through_drop_and_restore(formed: Disturbed) -> None:
    running = [(i, formed.traffic.start(**request)) for i, request in enumerate(formed.requests)]
    time.sleep(0.15)
    formed.cluster.set_layout("pp2")
    formed.check_memory()
    running += [(i, formed.traffic.start(**request)) for i, request in enumerate(formed.requests)]
    formed.check_all(running[12:])
    running += [(i, formed.traffic.start(**formed.requests[i])) for i in range(6)]
    time.sleep(0.15)
    formed.cluster.set_layout("dp")
    formed.check_memory()
    formed.check_all([*running[:12], *running[24:]])


def stages_s(cluster: ElasticCluster) -> list[tuple[float, float]]:
    """(busy, idle) of each instance."""
    time.sleep(HEARD_S)
    stats = [instance.stats for instance in cluster.snapshot().instances]
    return [(one.total_stage_busy_s, one.total_stage_idle_s) for one in stats]


def test_every_stage_counts_its_time_and_only_while_the_pipeline_has_work(formed: Disturbed) -> None:
    cluster = formed.cluster
    cluster.set_layout("pp2")
    before, started_s = stages_s(cluster), time.perf_counter()
    formed.check_all([(i, formed.traffic.start(**formed.requests[i])) for i in range(6)])
    took_s, after = time.perf_counter() - started_s, stages_s(cluster)
    for (busy_s, idle_s), (busy_before_s, idle_before_s) in zip(after, before, strict=True):
        assert busy_s > busy_before_s
        assert idle_s > idle_before_s, "a stage waits at least for its next microbatch's message"
        assert busy_s + idle_s - busy_before_s - idle_before_s < took_s
    time.sleep(PAUSE_S)
    formed.check_all([(0, formed.traffic.start(**formed.requests[0]))])
    again = stages_s(cluster)
    assert all(last[1] - first[1] < PAUSE_S for first, last in zip(after, again, strict=True)), "no work is no bubble"
    cluster.set_layout("dp")
    formed.check_all([(0, formed.traffic.start(**formed.requests[0]))])
    assert stages_s(cluster) == again
