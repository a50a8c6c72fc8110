"""How the work of a pipeline becomes microbatches changes no token, and stages tell how long they computed."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from pengserve.planners.types.config import MicrobatchPolicy
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.traffic import Traffic
from tests.system.test_shape_exactness import MEMORY_BYTES, Disturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

HEARD_S = 0.5  # until the controller has asked every instance again
PAUSE_S = 3.0  # without work; far above what the stages of one request wait for each other


@pytest.fixture(scope="module")
def by_tokens(model: Any) -> Iterator[Disturbed]:
    with (
        elastic_cluster(
            model, 2, degrees=(), max_stages=2, memory_bytes=MEMORY_BYTES, microbatches=MicrobatchPolicy.TOKENS
        ) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        yield Disturbed(cluster, traffic, count=12, max_tokens=40)


def test_token_counting_gives_the_tokens_of_dp_through_drop_and_restore(by_tokens: Disturbed) -> None:
    running = [(i, by_tokens.traffic.start(**request)) for i, request in enumerate(by_tokens.requests)]
    time.sleep(0.15)
    by_tokens.cluster.set_layout("pp2")
    by_tokens.check_memory()
    running += [(i, by_tokens.traffic.start(**request)) for i, request in enumerate(by_tokens.requests)]
    by_tokens.check_all(running[12:])
    running += [(i, by_tokens.traffic.start(**by_tokens.requests[i])) for i in range(6)]
    time.sleep(0.15)
    by_tokens.cluster.set_layout("dp")
    by_tokens.check_memory()
    by_tokens.check_all([*running[:12], *running[24:]])


def stages_s(cluster: ElasticCluster) -> list[tuple[float, float]]:
    """(busy, idle) of each instance."""
    time.sleep(HEARD_S)
    stats = [instance.stats for instance in cluster.snapshot().instances]
    return [(one.total_stage_busy_s, one.total_stage_idle_s) for one in stats]


def test_every_stage_counts_its_time_and_only_while_the_pipeline_has_work(by_tokens: Disturbed) -> None:
    cluster = by_tokens.cluster
    cluster.set_layout("pp2")
    before, started_s = stages_s(cluster), time.perf_counter()
    by_tokens.check_all([(i, by_tokens.traffic.start(**by_tokens.requests[i])) for i in range(6)])
    took_s, after = time.perf_counter() - started_s, stages_s(cluster)
    for (busy_s, idle_s), (busy_before_s, idle_before_s) in zip(after, before, strict=True):
        assert busy_s > busy_before_s
        assert idle_s > idle_before_s, "a stage waits at least for its next microbatch's message"
        assert busy_s + idle_s - busy_before_s - idle_before_s < took_s
    time.sleep(PAUSE_S)
    by_tokens.check_all([(0, by_tokens.traffic.start(**by_tokens.requests[0]))])
    again = stages_s(cluster)
    assert all(last[1] - first[1] < PAUSE_S for first, last in zip(after, again, strict=True)), "no work is no bubble"
    cluster.set_layout("dp")
    by_tokens.check_all([(0, by_tokens.traffic.start(**by_tokens.requests[0]))])
    assert stages_s(cluster) == again
