"""Laws of microbatches, over vLLM's own scheduler without a model: requests that are under way are left alone."""

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from pengserve.planners.short_prompts import SHORT
from pengserve.planners.types.config import MicrobatchPolicy
from pengserve.planners.types.contract import NO_CONTRACT, Contract, Slo
from pengserve.replicas.engine.placement.slo_gate import SloGate
from pengserve.replicas.engine.scheduling.chunk_shares import ChunkShares
from pengserve.replicas.engine.scheduling.microbatches import FIRST_MODEL, Microbatches, chunks_of, prompt_tokens_of
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.scheduling.short_prompts import ShortPrompts
from pengserve.replicas.engine.vllm_seam import ModelRunnerOutput, SchedulerOutput
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import capacity_of, scheduler_handle

BLOCK_SIZE, NUM_BLOCKS, STEP_TOKENS, MAX_TOKENS = 16, 64, 48, 5


def make_handle() -> SchedulerHandle:
    capacity = capacity_of(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=8)
    return scheduler_handle(capacity, max_num_batched_tokens=STEP_TOKENS)


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


def steps_until_guest(policy: MicrobatchPolicy, *, has_shares: bool) -> tuple[int, list[int]]:
    """Two stages read a flood's two prompts of twelve steps each when a guest's comes.

    Returns the microbatches until the guest's first token, and the flood's tokens in each.
    """
    capacity = capacity_of(400, BLOCK_SIZE, max_num_seqs=8)
    handle = scheduler_handle(capacity, max_num_batched_tokens=STEP_TOKENS, policy="priority")
    shares = ChunkShares(handle, lambda: 0.0)
    microbatches = Microbatches(handle, 2, FIRST_MODEL, policy, shares if has_shares else None)
    in_flight, floods = deque[SchedulerOutput](), list[int]()

    def add(name: str, num_tokens: int, band: int) -> None:
        request = scheduled_request(name, num_tokens, max_tokens=2)
        request.priority = band
        shares.note(band)
        handle.add(request)

    def step() -> SchedulerOutput:
        while len(in_flight) < 2 and (output := microbatches.schedule(list(in_flight), 2)).total_num_scheduled_tokens:
            in_flight.append(output)
        output = in_flight.popleft()
        microbatches.came_back(output, chunks_of(output), STAGE_S)
        finish(handle, output)
        return output

    add("flood 0", 12 * STEP_TOKENS, 1)
    add("flood 1", 12 * STEP_TOKENS, 1)
    step()
    add("guest", STEP_TOKENS, 0)
    guest = handle.request("guest")
    while not guest.num_output_tokens:
        output = step()
        floods.append(sum(count for name, count in output.num_scheduled_tokens.items() if name.startswith("flood")))
    while handle.has_unfinished:
        step()
    return len(floods), floods


@pytest.mark.parametrize("policy", list(MicrobatchPolicy))
def test_a_short_prompt_overtakes_a_long_one_of_a_tenant_ahead_of_its_share(policy: MicrobatchPolicy) -> None:
    """What is under way when it comes goes first: a microbatch a stage. Then all of the pipeline is the guest's."""
    count, floods = steps_until_guest(policy, has_shares=True)
    assert count <= 4 and not floods[-1], floods
    assert steps_until_guest(policy, has_shares=False)[0] >= 12, "without shares it waits for the flood's prompt"


def steps_behind_a_long_prompt(policy: MicrobatchPolicy, *, has_shorts: bool) -> tuple[int, int]:
    """Two stages read a prompt of 24 steps when one of an eighth of a step comes.

    Returns the microbatches until the first token of each, the short one's first.
    """
    handle = scheduler_handle(capacity_of(400, BLOCK_SIZE, max_num_seqs=8), max_num_batched_tokens=STEP_TOKENS)
    shorts = ShortPrompts(handle, BLOCK_SIZE) if has_shorts else None
    microbatches, in_flight = Microbatches(handle, 2, FIRST_MODEL, policy, shorts=shorts), deque[SchedulerOutput]()
    ends, count = dict[str, int](), 0
    handle.add(scheduled_request("long", 24 * STEP_TOKENS, max_tokens=2))
    while handle.has_unfinished:
        if count == 2:
            handle.add(scheduled_request("short", STEP_TOKENS // SHORT, max_tokens=20))
        while len(in_flight) < 2 and (output := microbatches.schedule(list(in_flight), 2)).total_num_scheduled_tokens:
            in_flight.append(output)
        output = in_flight.popleft()
        microbatches.came_back(output, chunks_of(output), STAGE_S)
        due = [name for name in output.num_scheduled_tokens if not handle.request(name).is_prefill_chunk]
        finish(handle, output)
        count += 1
        for name in due:
            ends.setdefault(name, count)
    return ends["short"] - 2, ends["long"]


@pytest.mark.parametrize("policy", list(MicrobatchPolicy))
def test_a_short_prompt_overtakes_a_long_one(policy: MicrobatchPolicy) -> None:
    """What is under way when it comes goes first."""
    short, long = steps_behind_a_long_prompt(policy, has_shorts=True)
    assert short <= 4 and long <= 28
    assert steps_behind_a_long_prompt(policy, has_shorts=False)[0] >= 20, "vLLM reads the long one first"


TOKEN_S, STAGE_S = 0.001, 0.01
TBT_S, NUM_TOKENS = 0.025, 60
STREAMED = Contract(slo=Slo(tbt_s=TBT_S), low_tokens=NUM_TOKENS)


@pytest.mark.parametrize("is_gated", [False, True])
def test_prompts_wait_for_the_slo_of_a_stream_in_a_pipeline(is_gated: bool) -> None:
    """Two stages: a token takes two microbatches. 24 prompts of 40 ms each, and a stream with 25 ms a token."""
    handle = make_handle()
    microbatches, in_flight = Microbatches(handle, 2), deque[SchedulerOutput]()
    known = SimpleNamespace(num_paced=1, contract=lambda name: STREAMED if name == "stream" else NO_CONTRACT)
    now_s, tokens_s = 0.0, list[float]()
    gate = SloGate(handle, known, lambda: now_s)
    handle.add(scheduled_request("stream", 40, max_tokens=NUM_TOKENS))
    while handle.has_unfinished:
        if len(tokens_s) == 10 and not handle.knows("p0"):
            for index in range(24):
                handle.add(scheduled_request(f"p{index}", 40, max_tokens=2))
        while len(in_flight) < 2:
            with gate.limiting() if is_gated else nullcontext():
                output = microbatches.schedule(list(in_flight), 2)
            if not output.total_num_scheduled_tokens:
                break
            in_flight.append(output)
        output = in_flight.popleft()
        took_s = STAGE_S + TOKEN_S * prompt_tokens_of(output)
        now_s += took_s
        microbatches.came_back(output, chunks_of(output), took_s)
        gate.learn(took_s, prompt_tokens_of(output), 2)
        finish(handle, output)
        if "stream" in output.num_scheduled_tokens:
            tokens_s.append(now_s)
    tpot_s = (tokens_s[-1] - tokens_s[0]) / (NUM_TOKENS - 1)
    assert (tpot_s <= TBT_S) is is_gated, tpot_s
