"""A request that no instance can hold alone is held by a group; one that no group can hold gets a clear 400."""

import random
from typing import Any

import httpx
import pytest

from pengserve.planners.types.config import MergeConfig
from tests.support.elastic import elastic_cluster
from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import InstanceProcess
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

BLOCK_BYTES = 65_536  # of the tiny model's KV: 32 tokens
NUM_BLOCKS = 17  # the first is the null block: one instance holds 512 tokens
NUM_PROMPT, MAX_TOKENS = 600, 60


def test_a_long_request_gets_a_group(model: Any, instances: list[InstanceProcess]) -> None:
    generator = random.Random(4)
    prompt = [generator.randrange(10, 500) for _ in range(NUM_PROMPT)]
    short = prompt[:40]
    with serving(ingress_config(instances), FixedRoutes(instances)) as url:
        wait_ready(url)
        with Traffic(url) as traffic:
            expected = traffic.start(prompt, MAX_TOKENS).result(60)
            expected_short = traffic.start(short, MAX_TOKENS).result(60)
    merge = MergeConfig(is_auto=True, merge_below=0.0, min_dwell_s=1.0)  # load alone never merges here
    engine = {"kv_cache_memory_bytes": NUM_BLOCKS * BLOCK_BYTES}
    with (
        elastic_cluster(model, 2, engine=engine, merge=merge) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        limits = [lane.capacity.max_model_len for lane in cluster.snapshot().instances[0].lanes if lane.capacity]
        assert limits == [512, 1024]
        running = [
            traffic.start(short, MAX_TOKENS),
            traffic.start(prompt, MAX_TOKENS),
            traffic.start(short, MAX_TOKENS),
        ]
        found_short, found, also_short = (future.result(90) for future in running)
        assert not found.error, found.error
        assert found.token_ids == expected.token_ids
        assert found_short.token_ids == also_short.token_ids == expected_short.token_ids
        # Once it has ended, its instances serve alone again.
        cluster.wait(lambda s: all(len(group.members) == 1 for group in s.layout.groups), 30)
        too_long = [generator.randrange(10, 500) for _ in range(1100)]
        body = {"model": "tiny", "prompt": too_long, "max_tokens": 10}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30, trust_env=False)
        assert answer.status_code == 400, answer.text
        assert "1024" in answer.json()["error"]["message"]
