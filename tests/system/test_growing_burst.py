"""A burst that two pipelines cannot hold: they become a wider one as they are, and end, and nobody asks for it.

The controller decides by itself, by thresholds: where four instances share two cores, what a step costs alone says
nothing of four at once, and no prediction could be right. Every stream gives what it gives when nothing happens.
"""

from pathlib import Path
from typing import Any

import pytest

from pengserve.planners.types.config import DropConfig, JudgeConfig
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.layout import Group
from pengserve.planners.types.snapshot import ClusterSnapshot
from tests.support.elastic import ElasticCluster, elastic_cluster
from tests.support.streams import make_prompts
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

MEMORY_BYTES = 7 << 20  # of an instance: 3 MiB of weights; KV for about 1,900 tokens
ENDS_WITHIN_S = 500.0
BACK_WITHIN_S = 240.0
MOST_BURSTS = 3  # on a fast machine a burst may end before the controller has looked twice
WIDE = Group.parse("pp4@(0..3)")


def burst(count: int) -> list[dict[str, Any]]:
    """Greedy and seeded requests in turn; twelve of them are what one instance holds."""
    return [
        {"prompt": prompt, "max_tokens": 110} | ({"temperature": 0.8, "seed": i} if i % 2 else {})
        for i, prompt in enumerate(make_prompts(count, seed=5, longest=90))
    ]


def is_full(snapshot: ClusterSnapshot) -> bool:
    """Whether requests wait in both pipelines, and in one of them for memory and not just for the next step."""
    stats = [snapshot.instances[leader].stats for leader in (0, 2)]
    is_short = any(s.kv_blocks_used > 0.8 * s.kv_blocks_total for s in stats)
    return is_short and all(s.num_waiting > 0 for s in stats)


def grow(
    cluster: ElasticCluster, traffic: Traffic, requests: list[dict[str, Any]], expected: list[list[int]]
) -> list[dict[str, Any]]:
    """A burst, until all is as it was before it; the changes that made a wider pipeline of a narrower one."""
    num_ends = len(cluster.events(EventKind.TRANSITION_END))
    cluster.set_layout("pp2")
    running = [traffic.start(**request) for request in 6 * requests]
    cluster.wait(lambda s: is_full(s) or all(future.done() for future in running), ENDS_WITHIN_S)
    cluster.now(cluster.controller.auto_layout)
    for index, future in enumerate(running):
        stream = future.result(ENDS_WITHIN_S)
        assert not stream.error, stream.error
        assert stream.token_ids == expected[index % len(expected)], f"request {index}"
    cluster.wait(lambda s: all(group.shape == "dp" for group in s.layout.groups), BACK_WITHIN_S)
    ends = [event.data for event in cluster.events(EventKind.TRANSITION_END)[num_ends:]]
    print(*(f"\n  {end['what']}: {end['parts']}" for end in ends))
    return [end for end in ends if end["what"] == f"drop {WIDE} (carry)" and "pp2" in end["parts"]]


def test_a_burst_that_grows_widens_a_pipeline_with_all_that_runs(model: Path) -> None:
    drop = DropConfig(restore_below=0.6, quiet_s=0.5, min_dwell_s=0.5)
    with (
        elastic_cluster(
            model,
            4,
            degrees=(),
            max_stages=4,
            memory_bytes=MEMORY_BYTES,
            drop=drop,
            judge=JudgeConfig(is_on=False),
            engine={"max_num_seqs": 64},
        ) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        requests = burst(28)
        alone = [traffic.start(**request).result(ENDS_WITHIN_S) for request in requests]  # one by one: no pressure
        for _ in range(MOST_BURSTS):
            grown = grow(cluster, traffic, requests, [stream.token_ids for stream in alone])
            if grown:
                break
        assert grown and grown[0]["num_carried"] > 0
        for instance in cluster.snapshot().instances:
            assert cluster.call(cluster.port.check(instance.key)) == ()
