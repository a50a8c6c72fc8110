"""Laws of microbatches, over vLLM's own scheduler without a model: requests that are under way are left alone."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from pengserve.planners.types.config import MicrobatchPolicy
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.engine.microbatches import FIRST_MODEL, Microbatches, chunks_of
from pengserve.replicas.engine.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.vllm_seam import ModelRunnerOutput, SchedulerOutput
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.vllm_build import build_vllm_scheduler
from tests.support.vllm_requests import scheduled_request

BLOCK_SIZE, NUM_BLOCKS, STEP_TOKENS, MAX_TOKENS = 16, 64, 48, 5


def make_handle() -> SchedulerHandle:
    capacity = KvCapacity(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        bytes_per_block=1,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        max_num_seqs=8,
        weight_bytes=0,
    )
    return SchedulerHandle(
        build_vllm_scheduler(capacity, SchedulerOptions(max_num_batched_tokens=STEP_TOKENS), is_terse=False)
    )


def finish(handle: SchedulerHandle, output: SchedulerOutput) -> None:
    """The microbatch comes back: requests whose prompts are computed get a token."""
    ids = list(output.num_scheduled_tokens)
    ends = [chunk.prefix_tokens + chunk.num_tokens for chunk in chunks_of(output)]
    tokens = [[7] if end == handle.request(i).num_tokens else [] for i, end in zip(ids, ends, strict=True)]
    handle.update(output, ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, tokens))


@pytest.mark.parametrize("policy", list(MicrobatchPolicy))
@given(prompts=st.lists(st.integers(1, 100), min_size=1, max_size=8), num_stages=st.integers(2, 4))
def test_a_request_is_in_one_microbatch_at_a_time_and_all_requests_end(
    policy: MicrobatchPolicy, prompts: list[int], num_stages: int
) -> None:
    handle = make_handle()
    microbatches = Microbatches(handle, num_stages, FIRST_MODEL, policy)
    for index, num_tokens in enumerate(prompts):
        handle.add(scheduled_request(f"r{index}", num_tokens, max_tokens=MAX_TOKENS))
    in_flight: deque[SchedulerOutput] = deque()
    for _ in range(40 * len(prompts)):
        while len(in_flight) < num_stages:
            decoding = {r.request_id for r in handle.running if r.num_output_tokens}
            output = microbatches.schedule(list(in_flight), num_stages)
            if not output.total_num_scheduled_tokens:
                break
            assert output.total_num_scheduled_tokens <= STEP_TOKENS
            under_way = {name for other in in_flight for name in other.num_scheduled_tokens}
            assert not under_way & decoding & set(output.num_scheduled_tokens), "its last token has not come back"
            in_flight.append(output)
        if not in_flight:
            break
        output = in_flight.popleft()
        microbatches.came_back(output, chunks_of(output), 0.01)
        finish(handle, output)
    assert not handle.has_unfinished, "a request was never served"


def test_what_a_step_computes_is_said_by_prefix_and_tokens() -> None:
    handle = make_handle()
    handle.add(scheduled_request("a", 60, max_tokens=3))
    output = handle.schedule()
    assert [(chunk.prefix_tokens, chunk.num_tokens) for chunk in chunks_of(output)] == [(0, STEP_TOKENS)]
    finish(handle, output)
    assert [(chunk.prefix_tokens, chunk.num_tokens) for chunk in chunks_of(handle.schedule())] == [(STEP_TOKENS, 12)]
