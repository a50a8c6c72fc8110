"""Real instances, in every shape: where a queue has made prompts late, those that can be in time begin before them."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.traffic import TimedStream, Traffic
from tests.system.test_shape_exactness import MEMORY_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

STEP_TOKENS, LONG, NUM_LATE, NUM_NEW = 64, 900, 32, 4  # a prompt takes 15 steps; 16 late ones were few on fast cores
PAUSE_S = 0.15  # until the late ones are very late, and the time of an order is there
ENGINE = {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 32, "enable_prefix_caching": False}
ENDS_WITHIN_S = 120.0
SHAPES = ("dp", "tp2", "pp2")
LATE, IN_TIME = {"slo": {"ttft_ms": 1}}, {"slo": {"ttft_ms": 600_000}}


def prompts() -> list[list[int]]:
    generator = random.Random(13)
    return [[generator.randrange(10, 500) for _ in range(LONG)] for _ in range(NUM_LATE + NUM_NEW)]


@pytest.fixture(scope="module")
def cluster(model: Any) -> Iterator[ElasticCluster]:
    with elastic_cluster(model, 2, max_stages=2, memory_bytes=MEMORY_BYTES, engine=ENGINE) as found:
        yield found


@pytest.fixture(scope="module")
def traffic(cluster: ElasticCluster) -> Iterator[Traffic]:
    with cluster.ingress() as url, Traffic(url) as found:
        yield found


@pytest.fixture(scope="module")
def expected(cluster: ElasticCluster, traffic: Traffic) -> list[TimedStream]:
    """What each request gives alone."""
    cluster.set_layout("dp")
    return [traffic.start(prompt, 5).result(ENDS_WITHIN_S) for prompt in prompts()]


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_that_can_be_in_time_begin_before_late_ones_and_all_are_served(
    cluster: ElasticCluster, traffic: Traffic, expected: list[TimedStream], shape: str
) -> None:
    cluster.set_layout(shape)
    running = []
    for index, prompt in enumerate(prompts()):
        if index == NUM_LATE:
            time.sleep(PAUSE_S)
        running.append(traffic.start(prompt, 5, **(LATE if index < NUM_LATE else IN_TIME)))
    found = [future.result(ENDS_WITHIN_S) for future in running]
    assert not any(stream.error for stream in [*expected, *found])
    assert [stream.token_ids for stream in found] == [stream.token_ids for stream in expected]
    first_s = [stream.times_s[0] for stream in found]
    late_s, new_s = sorted(first_s[:NUM_LATE]), sorted(first_s[NUM_LATE:])
    assert new_s[-1] < late_s[3 * NUM_LATE // 4], "first come, first served: behind all of them"
    cluster.require_memory()
