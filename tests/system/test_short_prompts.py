"""Real instances read short prompts in the steps of a long one, in every shape, and no token changes by it."""

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pengserve.planners.types.snapshot import ClusterSnapshot
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.traffic import TimedStream, Traffic
from tests.system.test_shape_exactness import MEMORY_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

STEP_TOKENS, LONG, SHORT = 64, 900, 8  # tokens; a long prompt takes 15 steps
NUM_LONG, NUM_SHORT = 6, 6
PAUSE_S = 0.03  # until the long ones are there
ENGINE = {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 16, "enable_prefix_caching": False}
ENDS_WITHIN_S = 120.0
HEARTBEATS_S = 1.5  # in which an idle instance tells its statistics
SHAPES = ("dp", "tp2", "pp2")


def prompts() -> list[list[int]]:
    generator = random.Random(11)
    return [[generator.randrange(10, 500) for _ in range(size)] for size in [LONG] * NUM_LONG + [SHORT] * NUM_SHORT]


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
    return [traffic.start(prompt, 30).result(ENDS_WITHIN_S) for prompt in prompts()]


@pytest.mark.parametrize("shape", SHAPES)
def test_short_prompts_are_answered_while_long_ones_are_read(
    cluster: ElasticCluster, traffic: Traffic, expected: list[TimedStream], shape: str
) -> None:
    cluster.set_layout(shape)
    running = []
    for index, prompt in enumerate(prompts()):
        if index == NUM_LONG:
            time.sleep(PAUSE_S)
        running.append(traffic.start(prompt, 30))
    found = [future.result(ENDS_WITHIN_S) for future in running]
    assert not any(stream.error for stream in [*expected, *found])
    assert [stream.token_ids for stream in found] == [stream.token_ids for stream in expected]
    first_s = [stream.times_s[0] for stream in found]
    # Two may have been read when the short ones come. In `dp` these go to the instance with less to read anyway.
    third_s = sorted(first_s[:NUM_LONG])[2]
    assert max(first_s[NUM_LONG:]) < third_s
    cluster.require_memory()


@pytest.mark.parametrize(("shape", "num_steps"), [("dp", 17), ("tp2", 16)])  # the last one has no tokens: it cleans up
def test_an_idle_instance_begins_a_long_prompt_with_a_short_step(
    cluster: ElasticCluster, traffic: Traffic, shape: str, num_steps: int
) -> None:
    def steps_of(snapshot: ClusterSnapshot) -> int:
        return sum(instance.stats.step for instance in snapshot.instances)

    cluster.set_layout(shape)
    readings = [-1]

    def stands_still(snapshot: ClusterSnapshot) -> bool:  # steps of the shape before are told a moment later
        time.sleep(HEARTBEATS_S)
        readings.append(steps_of(snapshot))
        return readings[-1] == readings[-2]

    cluster.wait(stands_still)
    before = readings[-1]
    prompt = [10 + index % 400 for index in range(15 * STEP_TOKENS)]
    assert not traffic.start(prompt, 1).result(ENDS_WITHIN_S).error
    cluster.wait(lambda snapshot: steps_of(snapshot) - before >= num_steps)
    assert steps_of(cluster.snapshot()) - before == num_steps
