"""A real instance tells its load with the step in which a request begins and ends, and each step's number."""

import time

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.planners.types.snapshot import InstanceStats
from pengserve.replicas.engine.link import InstanceLink, StepBatch
from tests.support.cut_requests import make_request
from tests.support.processes import CHANNEL_TOKEN, InstanceProcess

pytestmark = pytest.mark.slow

TIMEOUT_S = 240.0
NUM_TOKENS = 60


async def batches_of_a_request(link: InstanceLink) -> list[StepBatch]:
    """What comes with tokens, until the request has ended."""
    link.add(
        make_request("told", [5, 6, 7], SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)),
    )
    found: list[StepBatch] = []
    deadline_s = time.monotonic() + TIMEOUT_S
    async for event in link.events():
        assert time.monotonic() < deadline_s
        if isinstance(event, StepBatch) and event.outputs.outputs:
            found.append(event)
            if event.outputs.outputs[0].finish_reason is not None:
                return found
    raise AssertionError("the link never ends without an error")


async def test_load_is_told_where_a_request_begins_and_ends(instances: list[InstanceProcess]) -> None:
    link = await InstanceLink.connect(instances[0].endpoint, token=CHANNEL_TOKEN, client_id="told")
    batches = await batches_of_a_request(link)
    first, last = batches[0].stats, batches[-1].stats
    assert isinstance(first, InstanceStats) and first.num_running == 1
    assert isinstance(last, InstanceStats) and last.num_running == 0 and last.kv_blocks_used == 0
    assert last.total_finished == first.total_finished + 1
    assert last.total_generated_tokens == first.total_generated_tokens + NUM_TOKENS - 1
    steps = [batch.stats.step for batch in batches]
    assert steps == list(range(steps[0], steps[0] + NUM_TOKENS))
    assert link.step == steps[-1] and link.stats == last
    await link.close()
