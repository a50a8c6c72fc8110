"""Laws: while KV of a request is on its way to its blocks, no other request gets them, also when its client leaves;
and requests between two instances are counted, and counted once."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.instance_lanes import Lanes
from pengserve.replicas.engine.lanes.lane_totals import LaneTotals
from pengserve.replicas.engine.vllm_seam import Request, RequestStatus
from pengserve.replicas.engine.wire import copy_id
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import capacity_of, scheduler_handle

BLOCK_SIZE, NUM_BLOCKS = 16, 8


@pytest.fixture
def lane() -> Any:
    """A leader's lane with vLLM's scheduler and no model."""
    capacity = capacity_of(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=4)
    made: Any = PpLane.__new__(PpLane)
    made._handle = scheduler_handle(capacity, max_num_batched_tokens=64)
    made._arriving, made._ended, made._withheld, made._added, made._is_exchanging = {}, [], [], 0, True
    made._in_flight = []
    made._chunks, made._arriving_parked, made.residency, made.tiers = None, set(), None, None
    made._beyond, made.sizes = [], SimpleNamespace(smallest=NUM_BLOCKS + 1)
    made._block_hasher, made.group = None, SimpleNamespace(unique_name="pp2@(0,1)")
    made.shape, made.capacity, made._queued = "pp2", capacity, ((0, 0, 0), 0)
    made._totals = LaneTotals(departures=made._handle.departures)
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


def test_a_request_whose_kv_is_on_its_way_counts_from_the_first_statistics_on(lane: Any) -> None:
    before = lane.stats()
    lane.expect(half_decoded("a"), 3 * BLOCK_SIZE)
    coming = lane.stats()
    lane.arrived()
    for found in (coming, lane.stats()):
        assert (found.num_running, found.num_waiting, found.num_holding) == (0, 1, 1)
        assert (found.kv_blocks_used, found.queued_tokens) == (4, 0)
        assert found.longest_tokens == 3 * BLOCK_SIZE + 1
    lane.scheduler.schedule()
    running = lane.stats()
    assert (running.num_running, running.num_waiting, running.num_holding) == (1, 0, 0)
    assert (before.num_waiting, before.longest_tokens) == (0, 0)


def test_a_request_that_is_sent_again_is_no_new_one(lane: Any) -> None:
    for wire_id in ("chat-1", copy_id("chat-1", 2), copy_id("chat-1", 3)):
        lane.add(scheduled_request(wire_id, BLOCK_SIZE))
    found = lane.stats()
    assert (found.total_requests, found.total_request_tokens, found.total_sent_again) == (1, BLOCK_SIZE, 2)


def test_what_comes_to_a_follower_and_goes_on_to_its_leader_is_counted_without_a_step(lane: Any) -> None:
    clock = SimpleNamespace(busy_s=1.0, idle_s=2.0)
    here: Any = SimpleNamespace(
        registry=SimpleNamespace(clock=clock), dp=lane, _idle_totals={"total_requests": 4}, num_sent_back=lambda: 7
    )
    told = replace(lane.stats(), is_follower=True)
    lane.count_come(scheduled_request("chat-1", BLOCK_SIZE))
    found = Lanes.up_to_date(here, told)
    assert (found.total_requests, found.total_request_tokens, found.total_sent_back) == (5, BLOCK_SIZE, 7)
    assert not lane.scheduler.has_unfinished
