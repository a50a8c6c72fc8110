"""A burst that two pipelines cannot hold: they become a wider one as they are, and end, and nobody asks for it.

The controller decides by itself. Every stream gives what it gives when nothing happens.
"""

from pathlib import Path
from typing import Any

import pytest

from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.events import EventKind
from pengserve.planners.types.layout import Group
from pengserve.planners.types.snapshot import ClusterSnapshot
from tests.support.elastic import elastic_cluster
from tests.support.streams import make_prompts
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

MEMORY_BYTES = 7 << 20  # of an instance: 3 MiB of weights; KV for about 1,900 tokens
ENDS_WITHIN_S = 500.0
BACK_WITHIN_S = 240.0
WIDE = Group.parse("pp4@(0..3)")


def burst(count: int) -> list[dict[str, Any]]:
    """Greedy and seeded requests in turn; twelve of them are what one instance holds."""
    return [
        {"prompt": prompt, "max_tokens": 110} | ({"temperature": 0.8, "seed": i} if i % 2 else {})
        for i, prompt in enumerate(make_prompts(count, seed=5, longest=90))
    ]


def is_queued(snapshot: ClusterSnapshot) -> bool:
    return all(snapshot.instances[leader].stats.num_waiting > 0 for leader in (0, 2))


def test_a_burst_that_grows_widens_a_pipeline_with_all_that_runs(model: Path) -> None:
    drop = DropConfig(restore_below=0.6, quiet_s=0.5, min_dwell_s=0.5)
    with (
        elastic_cluster(
            model, 4, degrees=(), max_stages=4, memory_bytes=MEMORY_BYTES, drop=drop, engine={"max_num_seqs": 64}
        ) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        requests = burst(28)
        alone = [traffic.start(**request).result(ENDS_WITHIN_S) for request in requests]  # one by one: no pressure
        cluster.set_layout("pp2")
        running = [traffic.start(**request) for request in 6 * requests]
        cluster.wait(is_queued)
        cluster.now(cluster.controller.auto_layout)
        cluster.wait(lambda s: WIDE in s.layout.groups)
        for index, future in enumerate(running):
            stream = future.result(ENDS_WITHIN_S)
            assert not stream.error, stream.error
            assert stream.token_ids == alone[index % len(alone)].token_ids, f"request {index}"
        cluster.wait(lambda s: all(group.shape == "dp" for group in s.layout.groups), BACK_WITHIN_S)
        ends = cluster.events(EventKind.TRANSITION_END)
        print(*(f"\n  {event.data['what']}: {event.data['parts']}" for event in ends))
        wide = next(event.data for event in ends if event.data["what"] == f"drop {WIDE} (carry)")
        assert "pp2" in wide["parts"] and wide["num_carried"] > 0
        for instance in cluster.snapshot().instances:
            assert cluster.call(cluster.port.check(instance.key)) == ()
