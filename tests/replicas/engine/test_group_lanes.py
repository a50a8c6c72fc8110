"""Laws of a group's lane at its leader, over vLLM's own scheduler without a model: blocks, holding, and its run."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.planners.types.contract import NO_CONTRACT
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.engine.groups.group_lane import GroupLane
from pengserve.replicas.engine.groups.group_run import STEP, GroupRun
from pengserve.replicas.engine.groups.pp_lane import PpLane
from pengserve.replicas.engine.groups.step_message import ResumedRequest
from pengserve.replicas.engine.groups.tp_lane import LEASE_CHUNK, TpLane
from pengserve.replicas.engine.groups.under_way import Microbatch
from pengserve.replicas.engine.placement.placement_notes import PlacementNotes
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.vllm_build import build_vllm_scheduler
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import capacity_of

BLOCK_SIZE, NUM_BLOCKS, STEP_TOKENS = 16, 64, 64
CAPACITY = capacity_of(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=4)


def leader(kind: type[Any]) -> Any:
    """A leader's lane with a scheduler and no model."""
    lane = kind.__new__(kind)
    scheduler = build_vllm_scheduler(CAPACITY, SchedulerOptions(max_num_batched_tokens=STEP_TOKENS), is_terse=False)
    lane._handle, lane.capacity, lane.shape = SchedulerHandle(scheduler), CAPACITY, "test"
    lane._block_hasher, lane._added, lane._is_held, lane._run = None, 0, False, None
    lane.residency = None
    lane._known, lane._forgotten = [], []
    lane.config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=STEP_TOKENS))
    lane.group = SimpleNamespace(unique_name="test")
    return lane


def tp_lane() -> TpLane:
    """Without a lease."""
    lane: TpLane = leader(TpLane)
    lane._withheld, lane._lease, lane.num_lendable = lane.scheduler.withhold(NUM_BLOCKS), [], 0
    lane.leased = []  # type: ignore[attr-defined]
    lane.base = SimpleNamespace(contracts=None)  # type: ignore[assignment]
    lane.on_lease = lambda lane, ids: lane.leased.extend(ids)  # type: ignore[attr-defined]
    return lane


def pp_lane() -> PpLane:
    """With all blocks."""
    lane: PpLane = leader(PpLane)
    lane._withheld, lane._arriving, lane._in_flight, lane._ended = [], {}, [], []  # type: ignore[assignment,attr-defined]
    lane._arriving_parked = set()
    lane._is_settled, lane._is_exchanging = True, False
    lane.residency = lane.tiers = lane._lane_tiers = None
    lane._beyond, lane._host_rows, lane.sizes = [], 0, SimpleNamespace(smallest=NUM_BLOCKS + 1)
    lane.scheduler.watch_frees(lane._note_freed)
    return lane


# Tensor-parallel lanes ------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, NUM_BLOCKS)), max_size=12))
def test_what_a_lane_has_leased_and_what_it_has_not_is_all_that_there_is(moves: list[tuple[bool, int]]) -> None:
    lane, leased = tp_lane(), set[int]()
    for grows, count in moves:
        if grows:
            grown = lane.grow(count)
            assert not leased & set(grown), "a block joins once"
            leased |= set(grown)
        else:
            shrunk = lane.shrink(count)
            assert set(shrunk) <= leased, "a block leaves that had joined"
            leased -= set(shrunk)
        assert lane.num_held == lane.num_free() == len(leased)


def test_blocks_of_requests_stay_when_a_lane_shrinks() -> None:
    lane = tp_lane()
    lane.grow(8)
    assert lane.admit(scheduled_request("a", 40), 33) is not None
    used = set(lane.block_ids("a"))
    assert len(used) == 3
    assert not used & set(lane.shrink_all()) and lane.num_held == 3 and lane.num_free() == 0


@pytest.mark.parametrize("lendable", [0, 3, NUM_BLOCKS])
def test_a_step_leases_ahead_what_it_may_need_and_never_what_members_lack(lendable: int) -> None:
    lane = tp_lane()
    lane.num_lendable = lendable
    lane.scheduler.add(scheduled_request("a", 100))
    lane._lease_ahead()
    wanted = -(-100 // BLOCK_SIZE) + 1
    assert lane.leased == lane._lease and len(lane._lease) == min(max(wanted, LEASE_CHUNK), lendable)  # type: ignore[attr-defined]
    assert lane.num_lendable == lendable - len(lane._lease)
    before = lane.num_held
    lane._lease_ahead()
    assert lane.num_held == before or lendable < wanted, "what is there is enough for the step"


# Pipelines ------------------------------------------------------------------------------------------------------------


def test_blocks_are_offered_in_the_order_in_which_they_get_memory() -> None:
    lane = pp_lane()
    order = lane.withhold_free()
    assert lane.num_free() == lane.num_held == 0 and lane.is_exchanging
    lane.offer(5)
    assert lane.num_free() == lane.num_held == 5
    assert set(lane.scheduler.withhold(5)) == set(order[:5])


def test_requests_whose_kv_is_on_its_way_are_here_and_not_scheduled_until_it_has_come() -> None:
    lane = pp_lane()
    assert lane.expect(scheduled_request("a", 40), 33) is not None
    lane.withhold_free()
    assert lane.num_requests() == 1 and lane.knows("a")
    assert lane.scheduler.schedule().total_num_scheduled_tokens == 0
    lane.arrived()
    assert not lane.is_exchanging and lane.num_held == NUM_BLOCKS
    assert dict(lane.scheduler.schedule().num_scheduled_tokens) == {"a": 7}, "what was computed is not computed again"


def test_a_request_that_finds_no_room_changes_nothing() -> None:
    lane = pp_lane()
    assert lane.expect(scheduled_request("long", NUM_BLOCKS * BLOCK_SIZE), NUM_BLOCKS * BLOCK_SIZE) is not None
    assert lane.expect(scheduled_request("b", 40), 33) is None
    assert lane.num_requests() == 1 and not lane.knows("b")


def test_a_token_in_flight_is_not_written_yet() -> None:
    """Of a pipeline's leader: its own stage runs a microbatch when the others have."""
    lane = pp_lane()
    request = scheduled_request("a")
    request.num_computed_tokens = 32
    assert lane.num_written(request) == 32 and lane.is_between_steps(request)
    cached = SimpleNamespace(resumed_req_ids={"b"})
    output: Any = SimpleNamespace(
        num_scheduled_tokens={"a": 1, "b": 7}, scheduled_new_reqs=[], scheduled_cached_reqs=cached
    )
    lane._in_flight.append(Microbatch(output, is_first=False))
    assert lane.num_written(request) == 31 and not lane.is_between_steps(request)
    assert lane.is_between_steps(scheduled_request("c"))
    begun = scheduled_request("b")
    begun.num_computed_tokens = 32
    assert lane.num_written(begun) == 0, "what it shares may be what a microbatch before this one writes"


@pytest.mark.parametrize("make", [tp_lane, pp_lane])
def test_members_hear_of_requests_that_left_before_those_that_came(make: Any) -> None:
    lane = make()
    if isinstance(lane, TpLane):
        lane.grow(8)
    request = scheduled_request("a", 40)
    assert lane.reserve(request, 41, 40) == 0
    lane.take_over(request)
    assert [known.req_id for known in lane._known] == ["a"]
    lane.release(["a"])
    assert (lane._known, lane._forgotten) == ([], ["a"])
    lane.take_over(scheduled_request("a", 40))
    assert [known.req_id for known in lane._known] == ["a"] and lane._forgotten == ["a"]


# Both -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tp_lane, pp_lane])
def test_a_lane_that_is_held_begins_no_step(make: Any) -> None:
    lane = make()
    lane.scheduler.add(scheduled_request("a"))
    assert lane.has_work()
    lane.hold(True)
    assert not lane.has_work() and not lane.num_in_flight
    lane.hold(False)
    assert lane.has_work()


def test_a_pipeline_that_is_held_finishes_what_is_in_it() -> None:
    lane = pp_lane()
    lane._in_flight.append(object())  # type: ignore[arg-type]
    lane.hold(True)
    assert lane.has_work() and lane.num_in_flight == 1


def test_what_a_run_has_not_sent_is_no_part_of_the_next() -> None:
    """A half-decoded request may come while the lane is held, and go with the group before any step."""
    lane = tp_lane()
    lane._active = SimpleNamespace(activate=lambda group: None)  # type: ignore[assignment]
    keys = tuple(InstanceKey(instance_id=InstanceId(i), incarnation=1) for i in range(2))
    group: Any = SimpleNamespace(name="tp/3", members=keys)
    lane.enter(GroupRun(communicator=group, seed=1, post=None))  # type: ignore[arg-type]
    lane._known = [ResumedRequest("a", [1], SamplingParams(), [2])]
    lane.leave()
    assert lane._known == []


def test_a_lane_that_does_not_run_sends_nothing() -> None:
    with pytest.raises(AssertionError, match="does not run"):
        tp_lane().run  # noqa: B018


def test_every_message_of_a_run_begins_with_its_stamp_and_goes_to_the_member_of_that_rank() -> None:
    keys = tuple(InstanceKey(instance_id=InstanceId(i), incarnation=1) for i in range(3))
    sent: list[Any] = []
    post: Any = SimpleNamespace(send=lambda key, kind, parts: sent.append((key, kind, list(parts))))
    group: Any = SimpleNamespace(name="tp/3", members=keys, timeout_s=1.0)
    run = GroupRun(communicator=group, seed=1, post=post)
    run.send(2, "hidden", [b"x"])
    run.send_step([b"s"])
    assert sent == [
        (keys[2], "hidden", [b"tp/3", b"x"]),
        *((key, STEP, [b"tp/3", b"s"]) for key in keys[1:]),
    ]
    assert (run.leader, run.members, run.timeout_s) == (keys[0], keys, 1.0)


# SLOs -----------------------------------------------------------------------------------------------------------------


def test_a_leader_holds_prompts_back_as_dp_does() -> None:
    """In each shape: the gate comes with the run, and vLLM schedules within it."""
    contracts = SimpleNamespace(
        num_paced=1, num_hurried=0, contract=lambda request_id: NO_CONTRACT, deposit_tokens=lambda name: 0
    )
    keys = tuple(InstanceKey(instance_id=InstanceId(i), incarnation=1) for i in range(2))
    run: Any = GroupRun(communicator=SimpleNamespace(name="g/3", members=keys), seed=1, post=None)  # type: ignore[arg-type]
    slots: dict[str, list[int]] = {"tp": [], "pp": []}
    tp, pp = tp_lane(), pp_lane()
    nothing = SimpleNamespace(total_num_scheduled_tokens=0, finished_req_ids=())
    tp._step = lambda: slots["tp"].append(tp.scheduler.new_slots) or {}  # type: ignore[method-assign,func-returns-value]
    pp.max_in_flight = 2
    pp._microbatches = SimpleNamespace(  # type: ignore[assignment]
        schedule=lambda *given: slots["pp"].append(pp.scheduler.new_slots) or nothing  # type: ignore[func-returns-value]
    )
    pp._recompute_if_stuck = lambda output: None  # type: ignore[method-assign]
    for lane in (tp, pp):
        lane.base = SimpleNamespace(contracts=contracts, placement_notes=PlacementNotes(), places_by_slo=True)  # type: ignore[assignment]
        lane._active = SimpleNamespace(activate=lambda group: None)  # type: ignore[assignment]
        lane._slo_gate = lane._slo_placement = lane.residency = None
        lane._chunks = lane._shorts = None
        lane._count = lambda *given: None  # type: ignore[method-assign]
        GroupLane.enter(lane, run)
        assert lane._slo_gate is not None and lane._slo_placement is None, "without a host tier nothing is placed"
    for num_new, expected in ((None, 4), (1, 1)):
        for lane in (tp, pp):
            lane._slo_gate.num_new = lambda num_new=num_new: num_new  # type: ignore[method-assign,union-attr,misc]
        tp.step()
        assert not pp._begin()
        assert (slots["tp"].pop(), slots["pp"].pop()) == (expected, expected)
