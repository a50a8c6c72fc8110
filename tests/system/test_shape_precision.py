"""In bfloat16 a shape change may move a near-tie, but not what the model believes: the NLL of the same tokens stays.

Both runs choose their tokens greedily, so comparing each with itself would favour each one's own noise. As long as both
have chosen the same tokens, each run is the teacher-forced run of the other; what comes after the first difference is
left out.
"""

import statistics
import time
from typing import Any

import pytest

from tests.support.elastic import elastic_cluster
from tests.support.streams import make_prompts
from tests.support.traffic import Traffic

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

MAX_NLL_DIFFERENCE = 1e-3
# Rounding moves a single token's logprob of this model by 0.03 either way; only the mean of thousands says anything.
NUM_REQUESTS, MAX_TOKENS, NUM_RUNS = 96, 48, 2
BLOCK_BYTES = 32_768  # of the tiny model's KV: 32 tokens


@pytest.mark.parametrize("host_blocks", [0, 200])
def test_teacher_forced_nll_in_bfloat16(model: Any, host_blocks: int) -> None:
    """Also where the device holds a part of what runs, and the rest is on the host."""
    engine = {"dtype": "bfloat16"} | ({"kv_cache_memory_bytes": 40 * BLOCK_BYTES} if host_blocks else {})
    prompts = make_prompts(NUM_REQUESTS, seed=9, longest=120)
    with (
        elastic_cluster(model, 2, engine=engine, host_bytes=host_blocks * BLOCK_BYTES) as cluster,
        cluster.ingress() as url,
        Traffic(url) as traffic,
    ):
        running = [traffic.start(prompt, MAX_TOKENS, logprobs=1) for prompt in prompts]
        undisturbed = [future.result(60) for future in running]
        disturbed = []
        for _ in range(NUM_RUNS):
            running = [traffic.start(prompt, MAX_TOKENS, logprobs=1) for prompt in prompts]
            for layout in ("tp2", "dp", "tp2", "dp"):
                time.sleep(0.3)
                cluster.set_layout(layout, "carry")
            disturbed += [future.result(60) for future in running]
        assert sum(event.data.get("num_carried", 0) for event in cluster.events()) > NUM_REQUESTS / 4
    pairs: list[tuple[float, float]] = []
    for found, expected in zip(disturbed, undisturbed * NUM_RUNS, strict=True):
        assert not found.error and len(found.logprobs) == MAX_TOKENS
        for i, token in enumerate(found.token_ids):
            if token != expected.token_ids[i]:
                break
            pairs.append((found.logprobs[i], expected.logprobs[i]))
    difference = abs(statistics.fmean(found - expected for found, expected in pairs))
    print(f"\n  NLL of {len(pairs)} tokens through three switches differs by {difference:.6f}")
    assert len(pairs) > NUM_RUNS * NUM_REQUESTS * MAX_TOKENS / 4
    assert difference < MAX_NLL_DIFFERENCE
