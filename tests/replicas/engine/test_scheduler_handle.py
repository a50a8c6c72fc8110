"""Each method of `SchedulerHandle`, over vLLM's own scheduler without a model."""

import inspect

import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import init_none_hash

from pengserve.replicas.engine.lanes.lane_build import get_hash_fn_by_name, get_request_block_hasher
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.vllm_seam import ModelRunnerOutput, Request, RequestStatus, SchedulerOutput
from pengserve.replicas.kv.placement import Use
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.vllm_build import build_vllm_scheduler
from tests.support.vllm_requests import scheduled_request
from tests.support.vllm_schedulers import capacity_of

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS = 16, 8, 3
CAPACITY = capacity_of(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=MAX_SEQS)
CALLED: set[str] = set()


class Counted(SchedulerHandle):
    """Notes which methods and properties the tests of this file have used."""

    def __getattribute__(self, name: str) -> object:
        CALLED.add(name)
        return super().__getattribute__(name)


@pytest.fixture
def handle() -> SchedulerHandle:
    return Counted(build_vllm_scheduler(CAPACITY, SchedulerOptions(max_num_batched_tokens=64), is_terse=False))


def step(handle: SchedulerHandle, output: SchedulerOutput | None = None) -> SchedulerOutput:
    """One step, whose requests each get a token."""
    output = output or handle.schedule()
    ids = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, [[7] for _ in ids])
    handle.update(output, result)
    return output


def test_a_running_request_gives_way_and_is_computed_again(handle: SchedulerHandle) -> None:
    handle.add(scheduled_request("a", 20))
    handle.add(scheduled_request("b", 20))
    step(handle)
    output = handle.schedule()
    request = handle.request("a")
    handle.give_way(request)
    assert (request.status, request.num_preemptions) == (RequestStatus.PREEMPTED, 1)
    assert handle.running == [handle.request("b")] and handle.next_waiting is request and not handle.block_ids("a")
    step(handle, output)
    assert request.num_output_tokens == 2, "the token that was on its way has come"
    output = step(handle)
    assert output.preempted_req_ids == {"a"} and output.num_scheduled_tokens == {"b": 1, "a": 22}


def test_a_prompt_in_chunks_shows_what_no_step_has_computed(handle: SchedulerHandle) -> None:
    handle.add(scheduled_request("long", 100))
    assert handle.prefilling_tokens() == 0, "it only waits"
    output = handle.schedule()
    assert handle.prefilling_tokens() == 100, "the step is under way"
    handle.update(output, ModelRunnerOutput(["long"], {"long": 0}, [[]]))
    assert handle.prefilling_tokens() == 100 - 64
    step(handle)
    step(handle)
    assert handle.prefilling_tokens() == 0, "it decodes"
    output = handle.schedule()
    assert handle.prefilling_tokens() == 0, "one token under way is no prompt"
    step(handle, output)


def hashed(name: str) -> Request:
    """Of 40 tokens that are all alike."""
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    return Request(
        name, [1] * 40, params, None,
        block_hasher=lambda request: [
            str(i).encode() for i in range(len(request.block_hashes), request.num_tokens // BLOCK_SIZE)
        ],
    )  # fmt: skip


def test_the_full_blocks_of_a_prompt_are_found_in_the_cache() -> None:
    options = SchedulerOptions(max_num_batched_tokens=64, prefix_caching=True)
    capacity = capacity_of(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=3, max_model_len=128)
    handle = Counted(build_vllm_scheduler(capacity, options, is_terse=False))

    assert handle.cached_tokens(hashed("second")) == 0
    handle.add(hashed("first"))
    step(handle)
    assert handle.cached_tokens(hashed("second")) == 2 * BLOCK_SIZE


def test_requests_wait_run_and_end_in_vllm_s_order(handle: SchedulerHandle) -> None:
    for name in "abcd":
        handle.add(scheduled_request(name))
    handle.add(first := scheduled_request("first"), first=True)
    assert [request.request_id for request in handle.waiting] == ["first", "a", "b", "c", "d"]
    assert handle.queued_tokens() == 5 * 8
    assert handle.counts() == (0, 5) and handle.has_requests and handle.has_unfinished
    step(handle)
    assert [request.request_id for request in handle.running] == ["first", "a", "b"]
    assert handle.counts() == (MAX_SEQS, 2)
    assert handle.requests()[0] is first and handle.request("first") is first
    assert handle.max_running == MAX_SEQS and handle.max_step_tokens == 64
    assert [request.request_id for request in handle.candidates()] == ["first", "a", "b"]
    handle.end(["a", "unknown"])
    assert not handle.knows("a") and handle.knows("b")
    assert [request.request_id for request in handle.candidates()] == ["first", "b", "c"]
    assert handle.take_finished(["a"]) == {"a"} and handle.schedule().finished_req_ids == set()


def test_ages_are_tokens_of_answers_also_of_those_that_came_from_elsewhere(handle: SchedulerHandle) -> None:
    assert handle.ages() == {}
    moved = scheduled_request("moved")
    moved.append_output_token_ids([7] * 30)
    for request in (moved, scheduled_request("new")):
        handle.add(request)
    step(handle)
    assert handle.ages() == {"age_1": 31, "age_2": 31, "age_3": 31, "age_4": 1, "age_5": 1, "age_6": 1}


def test_those_that_wait_after_their_first_token_are_counted_apart(handle: SchedulerHandle) -> None:
    assert handle.queued() == {"queued_tokens": 0, "num_preempted": 0, "preempted_tokens": 0}
    moved, new = scheduled_request("moved"), scheduled_request("new")
    moved.append_output_token_ids([7] * 30)
    for request in (moved, new):
        handle.add(request)
    expected = moved.num_tokens + new.num_tokens
    assert handle.queued() == {"queued_tokens": expected, "num_preempted": 1, "preempted_tokens": 30}
    step(handle)
    assert handle.queued() == {"queued_tokens": 0, "num_preempted": 0, "preempted_tokens": 0}


def test_of_those_that_ended_only_what_is_asked_for_is_taken(handle: SchedulerHandle) -> None:
    for name in "ab":
        handle.add(scheduled_request(name))
    step(handle)
    handle.end("ab")
    assert handle.take_finished("a") == {"a"}
    assert handle.schedule().finished_req_ids == {"b"}, "a step in flight may be about it"


def test_where_the_runner_forgot_its_batch_the_next_step_brings_all_tokens(handle: SchedulerHandle) -> None:
    handle._scheduler.use_v2_model_runner = False  # the V1 runner needs them
    handle.add(scheduled_request("a"))
    step(handle)
    assert step(handle).scheduled_cached_reqs.all_token_ids == {}
    handle.bring_all_tokens()
    assert step(handle).scheduled_cached_reqs.all_token_ids.keys() == {"a"}
    assert step(handle).scheduled_cached_reqs.all_token_ids == {}


def test_a_paused_scheduler_begins_nothing_and_goes_on(handle: SchedulerHandle) -> None:
    handle.add(scheduled_request("a"))
    step(handle)
    handle.pause_new(True)
    handle.add(scheduled_request("b"))
    assert set(step(handle).num_scheduled_tokens) == {"a"}
    handle.pause_new(False)
    assert set(step(handle).num_scheduled_tokens) == {"a", "b"}


def test_a_step_takes_only_the_requests_that_are_chosen(handle: SchedulerHandle) -> None:
    for name in "abc":
        handle.add(scheduled_request(name))
    step(handle)
    output = handle.schedule_only({"c": 1, "a": 1})
    assert list(output.num_scheduled_tokens) == ["c", "a"]
    assert [request.request_id for request in handle.running] == ["a", "b", "c"], "the order is vLLM's again"
    step(handle, output)
    assert handle.max_step_tokens == 64
    assert set(step(handle).num_scheduled_tokens) == {"a", "b", "c"}, "none is passed over any more"


def arrived(name: str, num_tokens: int) -> Request:
    """A request that ran elsewhere."""
    request = scheduled_request(name, num_tokens)
    request.append_output_token_ids([5])
    request.status, request.num_preemptions = RequestStatus.PREEMPTED, 1
    return request


def test_a_request_comes_with_its_kv(handle: SchedulerHandle) -> None:
    request = arrived("a", 20)
    block_ids = handle.reserve(request, 20)
    assert block_ids == handle.block_ids("a") and len(block_ids) == 2
    assert not handle.schedule().num_scheduled_tokens, "its KV is not there yet"
    handle.enqueue(request)
    handle.cache(request)
    assert [found.request_id for found in handle.holding] == ["a"]
    assert handle.schedule().num_scheduled_tokens == {"a": 1}
    assert handle.blocks_freed(["a"]) == {"a": (2, [])}
    assert handle.reserve(arrived("b", 120), 119) is None, "there is no room"
    assert handle.num_free() == NUM_BLOCKS - 2


def test_a_reserved_request_gets_more_room(handle: SchedulerHandle) -> None:
    request = arrived("a", 20)
    first = handle.reserve(request, 20)
    assert first is not None and handle.grow(request, 20) and handle.block_ids("a") == first
    assert handle.grow(request, 40) and handle.block_ids("a")[:2] == first and len(handle.block_ids("a")) == 3
    assert handle.reserve(arrived("b", 60), 60) is not None
    assert not handle.grow(request, 5 * BLOCK_SIZE) and len(handle.block_ids("a")) == 3
    handle.end("ab")
    assert handle.num_free() == NUM_BLOCKS


def test_a_request_that_comes_shares_what_the_prefix_cache_has() -> None:
    options = SchedulerOptions(max_num_batched_tokens=64, prefix_caching=True)
    init_none_hash(get_hash_fn_by_name("sha256"))
    handle = Counted(build_vllm_scheduler(CAPACITY, options, is_terse=False))

    def hashed(request: Request) -> Request:
        request._block_hasher = get_request_block_hasher(BLOCK_SIZE, get_hash_fn_by_name("sha256"))
        request.update_block_hashes()
        return request

    handle.add(hashed(scheduled_request("a", 40)))
    step(handle)
    assert handle.reserve_cached(hashed(arrived("b", 40)), 45, 20) == BLOCK_SIZE, "no more than it has computed"
    assert handle.block_ids("b")[0] == handle.block_ids("a")[0]
    assert not set(handle.block_ids("b")[1:]) & set(handle.block_ids("a")) and len(handle.block_ids("b")) == 3
    assert handle.grow(handle.request("b"), 49) and len(handle.block_ids("b")) == 4
    assert handle.reserve_cached(hashed(arrived("c", 200)), 200, 190) is None
    assert handle.shared_blocks("a") == handle.block_ids("a")[:1] == handle.shared_blocks("b")
    pinned = handle.pin(handle.request("a").block_hashes)
    assert pinned == handle.block_ids("a")[: len(pinned)] and len(pinned) == 40 // BLOCK_SIZE
    handle.end("ab")
    assert handle.num_free() == NUM_BLOCKS - len(pinned), "as if a request held them"
    assert handle.num_held_alone(dict.fromkeys(pinned, 1)) == len(pinned)
    handle.unpin(pinned)
    assert handle.num_free() == NUM_BLOCKS


def test_a_request_is_held_and_goes_on(handle: SchedulerHandle) -> None:
    for name in "ab":
        handle.add(scheduled_request(name))
    step(handle)
    block_ids = handle.block_ids("a")
    handle.hold(request := handle.request("a"))
    assert set(step(handle).num_scheduled_tokens) == {"b"} and handle.knows("a")
    handle.enqueue(request)
    output = step(handle)
    assert output.num_scheduled_tokens == {"b": 1, "a": 1} and handle.block_ids("a") == block_ids
    resumed = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
    assert resumed == {"a"}, "the runner gets all its blocks again"
    handle.hold(request)
    handle.end("ab")
    assert handle.num_free() == NUM_BLOCKS


def test_a_request_that_waits_without_kv_is_held(handle: SchedulerHandle) -> None:
    handle.add(request := scheduled_request("a"))
    handle.withdraw(request)
    assert list(handle.waiting) == [] and handle.knows("a")
    handle.enqueue(request)
    assert list(handle.waiting) == [request]


def test_one_gives_up_its_blocks_where_none_can_go_on(handle: SchedulerHandle) -> None:
    for name in "ab":
        request = arrived(name, 64)
        assert handle.reserve(request, 63) is not None
        handle.enqueue(request)
    assert handle.num_free() == 0
    for request in handle.holding:  # each needs one more block
        request.append_output_token_ids([5])
    assert not handle.schedule().num_scheduled_tokens
    given_up = handle.give_up_one()
    assert given_up is not None and given_up.num_computed_tokens == 0
    assert [request.request_id for request in handle.waiting] == [given_up.request_id]
    assert step(handle).num_scheduled_tokens
    assert handle.give_up_one() is None, "a request runs"


def test_a_held_request_waits_again_or_gives_up_its_blocks(handle: SchedulerHandle) -> None:
    handle.add(scheduled_request("a"))
    step(handle)
    handle.hold(request := handle.request("a"))
    handle.enqueue(request)
    handle.withdraw(request)
    assert not handle.holding and not handle.schedule().num_scheduled_tokens
    handle.preempt(request)
    assert handle.num_free() == NUM_BLOCKS and request.num_computed_tokens == 0 and request.num_preemptions == 1
    assert step(handle).num_scheduled_tokens == {"a": 9}, "all of it is computed again"


def test_a_limited_step_takes_few_tokens_and_few_new_requests(handle: SchedulerHandle) -> None:
    for name in "ab":
        handle.add(scheduled_request(name))
    with handle.limited(num_new=1, max_tokens=12):
        assert step(handle).num_scheduled_tokens == {"a": 8}
    assert step(handle).num_scheduled_tokens == {"a": 1, "b": 8}, "the limits are vLLM's again"


def test_the_pool_says_what_each_block_is_used_for(handle: SchedulerHandle) -> None:
    assert handle.num_blocks == NUM_BLOCKS + 1
    handle.add(scheduled_request("a", 20))
    step(handle)
    blocks = handle.block_ids("a")
    assert [handle.uses()[block] for block in blocks] == [Use.HELD, Use.HELD]
    assert handle.prefilling_tokens() == 0 and handle.cached_tokens(scheduled_request("b", 20)) == 0
    handle.end("a")
    assert [handle.uses()[block] for block in blocks] == [Use.DEAD, Use.DEAD]


def test_blocks_are_withheld_offered_and_made(handle: SchedulerHandle) -> None:
    withheld = handle.withhold(NUM_BLOCKS - 1)
    assert handle.num_free() == 1
    handle.offer(withheld[:2])
    assert handle.num_free() == 3
    with pytest.raises(ValueError, match="free blocks"):
        handle.withhold(4)
    made = handle.extend(2)
    assert made == [NUM_BLOCKS + 1, NUM_BLOCKS + 2] and handle.num_free() == 3
    handle.offer(made)
    assert handle.num_free() == 5
    assert handle.reset_prefix_cache() is False, "blocks that are withheld count as used"
    handle.offer(withheld[2:])
    assert handle.reset_prefix_cache() is True


def test_blocks_are_spared_while_others_are_handed_out(handle: SchedulerHandle) -> None:
    handle.add(scheduled_request("a", 20))
    step(handle)
    held, free = handle.block_ids("a"), handle.withhold(2)
    handle.offer(free)
    with handle.sparing([*held, *free]):
        assert handle.num_free() == NUM_BLOCKS - 4
        taken = handle.withhold(NUM_BLOCKS - 4)
        assert set(free).isdisjoint(taken)
    assert handle.num_free() == 2 and sorted(handle.withhold(2)) == sorted(free)
    handle.offer([*free, *taken])
    handle.end("a")
    assert handle.num_free() == NUM_BLOCKS


def test_it_is_seen_when_a_request_loses_its_blocks(handle: SchedulerHandle) -> None:
    lost: list[tuple[str, list[int]]] = []
    handle.watch_frees(lambda request_id: lost.append((request_id, handle.block_ids(request_id))))
    for name in "ab":
        handle.add(scheduled_request(name, 8 * BLOCK_SIZE // 4 * 2 - 1))
    step(handle)
    blocks = {name: handle.block_ids(name) for name in "ab"}
    assert all(blocks.values()) and not lost
    handle.end("a")
    assert lost == [("a", blocks["a"])]
    handle.hold(request := handle.request("b"))
    handle.preempt(request)
    assert lost[1:] == [("b", blocks["b"])]


def test_no_more_new_requests_than_slots(handle: SchedulerHandle) -> None:
    assert handle.new_slots == handle.max_running and handle.takes_new
    handle.add(scheduled_request("a"))
    handle.schedule()
    assert handle.new_slots == handle.max_running - 1
    handle.pause_new(True)
    assert not handle.takes_new


def test_a_request_that_is_alone_shares_no_block(handle: SchedulerHandle) -> None:
    handle.add(scheduled_request("a", 2 * BLOCK_SIZE))
    handle.schedule()
    assert handle.shared_blocks("a") == []


def test_no_grammar_no_mask(handle: SchedulerHandle) -> None:
    handle.add(scheduled_request("a"))
    assert handle.grammar_bitmask(handle.schedule()) is None


def test_requests_that_wait_begin_in_the_order_that_they_are_given() -> None:
    options = SchedulerOptions(max_num_batched_tokens=64, policy="priority")
    handle = Counted(build_vllm_scheduler(CAPACITY, options, is_terse=False))
    names = [f"r{index}" for index in range(6)]
    for name in names:
        handle.add(scheduled_request(name, 8))
    handle.reorder({"r4": (-1, 5.0), "r5": (0, -2.0), "r0": (0, 1e12), "not here": (0, 0.0)})
    assert handle.goes_by_priority
    assert [request.request_id for request in handle.waiting] == ["r4", "r5", "r1", "r2", "r3", "r0"]
    assert set(step(handle).num_scheduled_tokens) == {"r4", "r5", "r1"}


def test_a_queue_by_arrival_is_left_as_it_is(handle: SchedulerHandle) -> None:
    for name in ("a", "b"):
        handle.add(scheduled_request(name, 8))
    handle.reorder({"b": (-1, 0.0)})
    assert [request.request_id for request in handle.waiting] == ["a", "b"]
    assert handle.request("b").priority == -1


def test_what_decodes_comes_first_in_the_batch_and_then_prompts_by_priority(handle: SchedulerHandle) -> None:
    for name, length, priority in (("late", 90, 2), ("early", 60, 1), ("decodes", 3, 3)):
        request = scheduled_request(name, length)
        request.priority = priority
        handle.add(request)
        with handle.passing_over(list(handle.running)), handle.limited(max_tokens=4):
            step(handle)
    assert [request.request_id for request in handle.running] == ["late", "early", "decodes"]
    handle.decode_first()
    assert [request.request_id for request in handle.running] == ["decodes", "early", "late"]
    with handle.limited(max_tokens=5):
        assert step(handle).num_scheduled_tokens == {"decodes": 1, "early": 4}


def test_chosen_prompts_begin_before_others_and_a_chunk_is_no_longer_than_it_may_be(handle: SchedulerHandle) -> None:
    for name in ("a", "b", "c"):
        handle.add(scheduled_request(name, 30))
    assert handle.next_waiting is handle.request("a") and handle.watermark_blocks == 0
    with handle.beginning_first([handle.request("c")]), handle.chunks_of(20):
        assert handle.next_waiting is handle.request("c")
        assert step(handle).num_scheduled_tokens == {"c": 20, "a": 20, "b": 20}
    assert step(handle).num_scheduled_tokens == {"c": 11, "a": 11, "b": 11}, "later steps are vLLM's own"


def test_what_waits_is_in_the_order_that_it_is_given(handle: SchedulerHandle) -> None:
    for name in ("a", "b", "c"):
        handle.add(scheduled_request(name, 30))
    handle.order_waiting([handle.request(name) for name in ("c", "a", "b")])
    assert [request.request_id for request in handle.waiting] == ["c", "a", "b"]


def test_blocks_that_are_given_up_hold_nothing_and_are_not_handed_out() -> None:
    options = SchedulerOptions(max_num_batched_tokens=64, prefix_caching=True)
    handle = Counted(build_vllm_scheduler(CAPACITY, options, is_terse=False))
    handle.add(request := hashed("a"))
    step(handle)
    handle.hold(request)
    handle.preempt(request)
    handle.keep_only(5)
    assert handle.num_free() == 4 and set(handle.uses()[1:5]) == {Use.DEAD}
    assert handle.reset_prefix_cache(), "no request has a block"
    handle.end_at(4 * BLOCK_SIZE)
    while handle.knows("a"):
        step(handle)
        assert set(handle.block_ids("a")) <= {1, 2, 3, 4}
        assert handle.num_blocks_of("a") == len(handle.block_ids("a"))
        assert handle.reset_prefix_cache() is not handle.knows("a")
    assert request.num_tokens == 4 * BLOCK_SIZE, "it ends where its blocks do"


def test_each_method_was_called_over_a_real_scheduler() -> None:
    """Comes last: pytest keeps the order of a file."""
    names = {name for name, _ in inspect.getmembers(SchedulerHandle) if not name.startswith("_")}
    assert names <= CALLED, f"no test of this file calls {names - CALLED}"
