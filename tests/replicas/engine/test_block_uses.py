"""Law: what is looked at again only where vLLM's calls have changed something is what a look at all blocks says."""

import random

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.vllm_seam import ModelRunnerOutput, Request, get_request_block_hasher
from pengserve.replicas.kv.placement import Use
from tests.support.vllm_schedulers import capacity_of, scheduler_handle

BLOCK_SIZE, NUM_BLOCKS = 4, 24


def use_of(handle: SchedulerHandle) -> list[int]:
    """By a look at every block."""
    blocks = handle._pool.blocks
    return [Use.HELD if b.ref_cnt else Use.DEAD if b.block_hash is None else Use.CACHED for b in blocks]


def a_request(name: str, rng: random.Random) -> Request:
    """Few tokens of few kinds: prefixes are often shared."""
    init_none_hash(sha256)
    prompt = [rng.randrange(3, 5)] * rng.randrange(1, 30)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    params = SamplingParams(max_tokens=rng.randrange(1, 12), ignore_eos=True)
    return Request(name, prompt, params, None, block_hasher=hasher)


def step(handle: SchedulerHandle) -> None:
    output = handle.schedule()
    ids = list(output.num_scheduled_tokens)
    done = [handle.request(i).num_computed_tokens >= handle.request(i).num_tokens for i in ids]
    tokens = [[7] if is_done else [] for is_done in done]
    handle.update(output, ModelRunnerOutput(ids, {name: k for k, name in enumerate(ids)}, tokens))


@pytest.mark.parametrize("seed", range(4))
def test_uses_are_those_of_a_look_at_every_block(seed: int) -> None:
    rng, seen = random.Random(seed), set[int]()
    handle = scheduler_handle(
        capacity_of(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=6), max_num_batched_tokens=16, prefix_caching=True
    )
    withheld: list[int] = []
    for index in range(400):
        match rng.randrange(8):
            case 0 if handle.counts()[1] < 4:
                handle.add(a_request(str(index), rng))
            case 1 if handle.requests():
                handle.end([rng.choice(handle.requests()).request_id])
            case 2 if handle.num_free() > 2:
                withheld += handle.withhold(rng.randrange(1, 3))
            case 3:
                handle.offer(withheld)
                withheld = []
            case 4 if rng.random() < 0.1:
                withheld += handle.extend(1)
            case 5 if rng.random() < 0.1:
                handle.end([request.request_id for request in handle.requests()])
                assert handle.reset_prefix_cache() or withheld
            case _:
                step(handle)
        if rng.random() < 0.5:
            found = handle.uses().tolist()
            assert found == use_of(handle)
            seen.update(found)
    assert seen == set(Use), "every use came up"
