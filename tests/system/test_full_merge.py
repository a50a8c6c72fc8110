"""Instances that are nearly full merge, and take all of their requests along with their KV.

Two long requests fill 106 of an instance's 127 blocks with their prompts, and 124 at their ends, 290 steps later. In
the group each needs 27 to 31 blocks of every member: at no time does one of them fit in what is free, so each wave has
to live on the blocks that it frees, and it does not matter when within these steps the members meet.
"""

import random
from pathlib import Path

import pytest

from tests.support.elastic import elastic_cluster
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_REQUESTS = 4
PROMPT_TOKENS, MAX_TOKENS = 1690, 290
ENGINE = {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 2048}  # 127 blocks of 32 tokens; a group's have 64
PROMPT_BLOCKS = 106
ENDS_WITHIN_S = 100.0


def test_nothing_is_recomputed_where_not_one_request_fits_in_what_is_free(model: Path) -> None:
    source = random.Random(5)
    prompts = [[source.randrange(10, 500) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_REQUESTS)]
    with elastic_cluster(model, 2, engine=ENGINE) as cluster, cluster.ingress() as url, Traffic(url) as traffic:
        cluster.set_layout("dp")
        requests = [{"prompt": prompt, "max_tokens": MAX_TOKENS} for prompt in prompts]
        expected = [stream.result(ENDS_WITHIN_S) for stream in [traffic.start(**request) for request in requests]]
        running = [traffic.start(**request) for request in requests]
        full = cluster.wait(
            lambda snapshot: all(i.stats.kv_blocks_used >= PROMPT_BLOCKS for i in snapshot.instances), timeout_s=60.0
        )
        assert {i.stats.kv_blocks_total for i in full.instances} == {127}, full.instances
        record = cluster.set_layout("tp2", "carry").last_switch
        assert record is not None and record.report is not None
        assert (record.report.num_carried, record.report.num_recomputed) == (NUM_REQUESTS, 0), record
        found = [stream.result(ENDS_WITHIN_S).token_ids for stream in running]
        assert found == [stream.token_ids for stream in expected]
        assert sum(i.stats.total_preemptions for i in cluster.snapshot().instances) == 0
