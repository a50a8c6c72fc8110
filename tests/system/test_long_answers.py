"""Real instances, in every shape, with steps scheduled ahead and without: where prompts wait for memory, long answers
give way, and go on with the tokens that they would have had.
"""

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import ahead_host
from tests.support.elastic import ElasticCluster, started
from tests.support.traffic import TimedStream, Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

MEMORY_BYTES = 6 << 20  # of an instance: 3 MiB of weights, and 43 blocks of 32 tokens
ENGINE = {"max_num_batched_tokens": 256, "max_num_seqs": 16, "enable_prefix_caching": False}
PROMPT, NUM_LONG, LONG, NUM_PROMPTS, SHORT = 500, 4, 150, 10, 20  # no shape has memory for all at once
BEGUN = 20  # tokens of each long answer, before prompts come
IN_VAIN = {"slo": {"ttft_ms": 1}}
SAMPLED = {"temperature": 1.0, "seed": 11}
ENDS_WITHIN_S = 120.0


class World(NamedTuple):
    cluster: ElasticCluster
    traffic: Traffic
    expected: list[TimedStream]  # what each request gives alone

    def gave_way(self) -> int:
        return sum(one.stats.total_departures_by_memory for one in self.cluster.snapshot().instances)

    def begin(self) -> list["Future[TimedStream]"]:
        """Long answers, then prompts for which there is no memory beside them."""
        streams = [TimedStream() for _ in range(NUM_LONG)]
        running = [begin(self.traffic, index, into=stream) for index, stream in enumerate(streams)]
        until_s = time.monotonic() + ENDS_WITHIN_S
        while any(len(stream.token_ids) < BEGUN for stream in streams) and time.monotonic() < until_s:
            time.sleep(0.01)
        return [*running, *(begin(self.traffic, NUM_LONG + index, **IN_VAIN) for index in range(NUM_PROMPTS))]

    def check(self, running: list["Future[TimedStream]"]) -> None:
        found = [future.result(ENDS_WITHIN_S) for future in running]
        assert not any(stream.error for stream in [*self.expected, *found])
        assert [stream.token_ids for stream in found] == [stream.token_ids for stream in self.expected]
        self.cluster.require_memory()


def begin(traffic: Traffic, index: int, **more: Any) -> "Future[TimedStream]":
    generator = random.Random(index)
    prompt = [generator.randrange(10, 500) for _ in range(PROMPT)]
    return traffic.start(prompt, LONG if index < NUM_LONG else SHORT, **(SAMPLED if index % 2 else {}), **more)


@pytest.fixture(scope="module", params=["in turn", "ahead"])
def world(request: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two instances, of which a step of one is under way while it schedules the next, or not."""
    folder = tmp_path_factory.mktemp("ahead")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "ahead":
            patch.setenv(ahead_host.VARIABLE, str(folder))
        cluster = ElasticCluster(
            model,
            2,
            max_stages=2,
            memory_bytes=MEMORY_BYTES,
            engine=ENGINE,
            host_module="tests.support.yielding_host",
        )
        with started(cluster), cluster.ingress() as url, Traffic(url) as traffic:
            alone = [begin(traffic, index).result(ENDS_WITHIN_S) for index in range(NUM_LONG + NUM_PROMPTS)]
            yield World(cluster, traffic, alone)


@pytest.mark.parametrize("shape", ["dp", "tp2", "pp2"])
def test_long_answers_give_way_and_go_on_as_they_were(world: World, shape: str) -> None:
    world.cluster.set_layout(shape)
    before = world.gave_way()
    world.check(world.begin())
    assert world.gave_way() > before


@pytest.mark.parametrize("shape", ["tp2", "pp2"])
def test_a_change_of_shape_takes_those_that_gave_way_along(world: World, shape: str) -> None:
    world.cluster.set_layout("dp")
    before, running = world.gave_way(), world.begin()
    world.cluster.set_layout(shape)
    world.cluster.set_layout("dp")
    world.check(running)
    assert world.gave_way() > before
