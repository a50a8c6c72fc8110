"""Law: while KV of a request is on its way to its blocks, no other request gets them, also when its client leaves."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.engine.pp_lane import PpLane
from pengserve.replicas.engine.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.vllm_seam import Request, RequestStatus
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.vllm_build import build_vllm_scheduler
from tests.support.vllm_requests import scheduled_request

BLOCK_SIZE, NUM_BLOCKS = 16, 8


@pytest.fixture
def lane() -> Any:
    """A leader's lane with vLLM's scheduler and no model."""
    capacity = KvCapacity(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        bytes_per_block=1,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        max_num_seqs=4,
        weight_bytes=0,
    )
    made: Any = PpLane.__new__(PpLane)
    made._handle = SchedulerHandle(
        build_vllm_scheduler(capacity, SchedulerOptions(max_num_batched_tokens=64), is_terse=False)
    )
    made._arriving, made._ended, made._withheld, made._added, made._is_exchanging = {}, [], [], 0, True
    made._block_hasher, made.group = None, SimpleNamespace(unique_name="pp2@(0,1)")
    return made


def half_decoded(name: str) -> Request:
    request = scheduled_request(name, 3 * BLOCK_SIZE)
    request.append_output_token_ids([7])
    request.status = RequestStatus.PREEMPTED
    return request


def test_an_aborted_request_keeps_its_blocks_until_its_kv_has_come(lane: Any) -> None:
    expected = {name: lane.expect(half_decoded(name), 3 * BLOCK_SIZE) for name in ("stays", "goes")}
    assert lane.num_free() == 0
    lane.abort(["goes", "unknown"])
    assert lane.num_free() == 0, "members still write into its blocks"
    lane.arrived()
    assert lane.num_free() == len(expected["goes"])
    assert not lane.knows("goes") and lane.knows("stays")
    assert lane.scheduler.block_ids("stays") == expected["stays"]
    lane.abort(["stays"])
    assert lane.num_free() == NUM_BLOCKS and not lane.scheduler.has_unfinished
