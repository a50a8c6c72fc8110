"""Instances that are nearly full merge, and take all of their requests along with their KV."""

import random
from pathlib import Path

import pytest

from tests.support.elastic import elastic_cluster
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_REQUESTS = 12
PROMPT_TOKENS, MAX_TOKENS = 200, 100
KV_BYTES = 4 << 20  # 63 blocks an instance; six requests hold 42 after their prompts, and 60 at their ends
ENDS_WITHIN_S = 60.0


def test_nothing_is_recomputed_where_each_wave_can_free_what_the_next_one_needs(model: Path) -> None:
    source = random.Random(5)
    prompts = [[source.randrange(10, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_REQUESTS)]
    with (
        elastic_cluster(model, 2, engine={"kv_cache_memory_bytes": KV_BYTES}) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        cluster.set_layout("dp")
        requests = [{"prompt": prompt, "max_tokens": MAX_TOKENS} for prompt in prompts]
        expected = [traffic.start(**request).result(ENDS_WITHIN_S).token_ids for request in requests]
        running = [traffic.start(**request) for request in requests]
        cluster.wait(lambda snapshot: all(i.stats.kv_blocks_used >= 42 for i in snapshot.instances), timeout_s=30.0)
        record = cluster.set_layout("tp2", "carry").last_switch
        assert record is not None and record.report is not None
        assert record.report.num_carried >= NUM_REQUESTS - 1, record
        assert record.report.num_recomputed == 0, record
        assert [stream.result(ENDS_WITHIN_S).token_ids for stream in running] == expected
