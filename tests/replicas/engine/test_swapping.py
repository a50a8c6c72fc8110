"""Laws of a pipeline's parked requests, over vLLM's own scheduler and real host rows, without a model.

Two members step: a follower as soon as it hears of a microbatch, the leader when the microbatch comes back. Each checks
that the KV of all tokens before a microbatch's is where the microbatch reads it.
"""

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from pengserve.replicas.engine.scheduling.microbatches import Microbatches, chunks_of
from pengserve.replicas.engine.tiers.stage_host import StageHost
from pengserve.replicas.engine.tiers.swapping import SwappedRequests
from pengserve.replicas.engine.vllm_seam import ModelRunnerOutput, Request, SchedulerOutput, get_request_block_hasher
from pengserve.replicas.kv.copies import Copy
from pengserve.replicas.kv.stage_rows import StageRows, Swap, stage_rows_in_row
from pengserve.replicas.kv.table import CellTable
from tests.replicas.kv.tiered_world import BLOCK_SIZE, TOKEN_BYTES, TieredWorld
from tests.support.vllm_schedulers import capacity_of, scheduler_handle

LAYERS, STAGES = 4, ((0, 2), (2, 4))
NUM_BLOCKS, STEP_TOKENS, STAGES_IN_FLIGHT = 40, 32, 2


class Member:
    """One stage: cells of its layers, and rows of its host."""

    def __init__(self, layers: tuple[int, int], host_blocks: int, link_bytes_per_s: float) -> None:
        self.layers = layers
        self.world = TieredWorld(LAYERS, 8, host_blocks, 4, link_bytes_per_s)
        self.kv = torch.zeros(LAYERS, NUM_BLOCKS + 1, BLOCK_SIZE * TOKEN_BYTES, dtype=torch.uint8)
        memory: Any = SimpleNamespace(
            kv=lambda layer: self.kv[layer],
            read_kv=lambda layer, blocks: self.kv[layer, list(blocks)].clone(),
            write_kv=lambda layer, blocks, data: self.kv[layer].__setitem__(list(blocks), data.view(len(blocks), -1)),
        )
        self.rows = StageRows(self.world.tiers, memory, layers, stage_rows_in_row(LAYERS, STAGES))
        table = CellTable(NUM_BLOCKS + 1)
        table.lease(range(1, NUM_BLOCKS + 1), range(1, NUM_BLOCKS + 1))
        self.host = StageHost(table)
        self.num_waits = 0  # for KV that was on its way to the device
        self.num_saved_waits = 0  # for blocks of one layer that were on their way to the host
        engine = self.world.tiers.engine
        hurry, engine.hurry = engine.hurry, self._wait  # type: ignore[method-assign]
        self._hurry = hurry

    def _wait(self, copies: list[Copy]) -> None:
        self.num_waits += not all(copy.to_host for copy in copies)
        self.num_saved_waits += sum(len(copy.cells) for copy in copies if copy.to_host)
        self._hurry(copies)

    def run(
        self, swaps: Sequence[Swap], output: SchedulerOutput, work: "Sequence[tuple[Request, list[int], int, int]]"
    ) -> None:
        """A microbatch of `(request, its blocks, tokens before, tokens after)`."""
        self.host.run(swaps, output)
        for request, blocks, start, stop in work:
            for layer in range(*self.layers):
                stamps = self.kv[layer, blocks].view(-1, TOKEN_BYTES)[:, 0].tolist()
                wanted = [self.stamp(request, layer, token) for token in range(stop)]
                assert stamps[:start] == wanted[:start], f"KV of {request.request_id} before token {start}"
                for token in range(start, stop):
                    cell = self.kv[layer, blocks[token // BLOCK_SIZE]].view(-1, TOKEN_BYTES)
                    cell[token % BLOCK_SIZE] = wanted[token]
        assert self.world.tiers.check() == () and self.host.check() == ()

    def stamp(self, request: Request, layer: int, token: int) -> int:
        """Of the tokens so far: equal prefixes have equal KV."""
        return hash((tuple(request.all_token_ids[: token + 1]), layer)) % 255 + 1


class Pipeline:
    """A leader's scheduler, its parked requests and two members. A microbatch gives each request a token."""

    def __init__(
        self, host_blocks: int = 200, *, by_priority: bool = False, links: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.members = [Member(layers, host_blocks, link) for layers, link in zip(STAGES, links, strict=True)]
        capacity = capacity_of(NUM_BLOCKS, BLOCK_SIZE, max_num_seqs=16)
        self.handle = scheduler_handle(
            capacity,
            max_num_batched_tokens=STEP_TOKENS,
            prefix_caching=True,
            policy="priority" if by_priority else "fcfs",
        )
        self.now_s = 0.0
        self.parked = SwappedRequests(self.handle, self.members[1].world.tiers, 2, lambda: self.now_s)
        self.parked.limit(min(member.rows.num_rows for member in self.members))
        for member, requests in zip(self.members, (None, self.parked), strict=True):
            member.host.open(member.rows, requests)
            member.host.enter(is_first=requests is None)
        self.microbatches = Microbatches(self.handle, STAGES_IN_FLIGHT)
        self.in_flight: deque[tuple[SchedulerOutput, list[Swap], Any, Any]] = deque()
        self.computed = Counter[str]()  # tokens, by request
        self.num_waits_beside = 0  # of microbatches that others than what they waited for could have had
        self.num_steps = 0

    def step(self) -> None:
        """As `PpLane.step`."""
        self.num_steps += 1
        self.now_s += 0.05
        while len(self.in_flight) < STAGES_IN_FLIGHT and self._begin():
            pass
        if self.in_flight:
            self._end(*self.in_flight.popleft())
        assert self.parked.check() == ()

    def abort(self, name: str) -> None:
        """As `Lane.abort`."""
        self.handle.end([name])
        self.parked.forget([name])

    def _begin(self) -> bool:
        self.members[1].host.note_come()
        is_alone = not (self.handle.running or self.handle.holding)
        output = self.parked.schedule(self.microbatches, [other[0] for other in self.in_flight], STAGES_IN_FLIGHT)
        swaps, parked = self.parked.queue.take(), {request.request_id for request in self.parked.parked}
        under_way = {name for other in self.in_flight for name in other[0].num_scheduled_tokens}
        assert not parked & under_way, "a request leaves between its steps"
        assert not [name for name in output.num_scheduled_tokens if self.parked.is_ordered(self.handle.request(name))]
        if not (output.total_num_scheduled_tokens or output.finished_req_ids or swaps):
            return False
        starts = dict(zip(output.num_scheduled_tokens, (c.prefix_tokens for c in chunks_of(output)), strict=True))
        work = [
            (self.handle.request(name), self.handle.block_ids(name), starts[name], starts[name] + count)
            for name, count in output.num_scheduled_tokens.items()
        ]
        self.computed.update(output.num_scheduled_tokens)
        self.run_member(0, is_alone, swaps, output, work)
        self.in_flight.append((output, swaps, work, (is_alone, self.members[0].host.tell())))
        return True

    def _end(self, output: SchedulerOutput, swaps: list[Swap], work: Any, told: Any) -> None:
        if output.total_num_scheduled_tokens:
            self.members[1].host.hear(told[1])
        self.run_member(1, told[0], swaps, output, work)
        ids = list(output.num_scheduled_tokens)
        ends = {request.request_id: stop for request, _, _, stop in work}
        tokens = [
            [len(self.handle.request(i).all_token_ids) % 7]
            if self.handle.knows(i) and ends[i] >= self.handle.request(i).num_tokens
            else []
            for i in ids
        ]
        self.microbatches.came_back(output, chunks_of(output), 0.01)
        self.handle.update(output, ModelRunnerOutput(ids, {name: k for k, name in enumerate(ids)}, tokens))

    def run_member(self, number: int, is_alone: bool, *microbatch: Any) -> None:
        member = self.members[number]
        before = member.num_waits
        member.run(*microbatch)
        self.num_waits_beside += (member.num_waits - before) * (not is_alone)

    def run(self, most: int = 4000) -> None:
        while self.handle.has_unfinished or self.parked.has_work() or self.in_flight:
            self.step()
            assert self.num_steps < most, "the requests do not come on"

    def close(self) -> None:
        for member in self.members:
            member.rows.give_all()
            member.world.close()


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    pipeline = Pipeline()
    yield pipeline
    pipeline.close()


def a_request(name: str, prompt: list[int], max_tokens: int = 40) -> Request:
    """With the hashes of its blocks, as an engine prepares it."""
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), None, block_hasher=hasher)


def some_requests(count: int, seed: int = 1) -> list[Request]:
    """Every third begins as the one before it does."""
    rng, prompts = random.Random(seed), list[list[int]]()
    for i in range(count):
        prompt = [rng.randrange(3, 500) for _ in range(rng.choice([5, 30, 60]))]
        prompts.append(prompts[-1][:20] + prompt[:40] if i % 3 == 2 else prompt)
    return [a_request(str(i), prompt) for i, prompt in enumerate(prompts)]


def is_on_device(pipeline: Pipeline, request: Request) -> bool:
    return bool(pipeline.handle.block_ids(request.request_id))


def test_requests_of_several_times_the_devices_all_end_without_recompute(pipeline: Pipeline) -> None:
    requests = some_requests(12)
    for request in requests:
        pipeline.handle.add(request)
    pipeline.run()
    assert [request.num_output_tokens for request in requests] == [40] * 12
    assert {request.num_preemptions for request in requests} == {0} and not pipeline.parked.num_given_up
    counts = pipeline.members[1].world.tiers.counts
    assert counts.parks > 0 and counts.evicted > 0 and counts.reused > 0, "a second time copies only what is new"


@pytest.mark.parametrize("links", [(2e6, 2e6), (1e6, 1e8), (1e8, 1e6)], ids=["both", "follower", "leader"])
def test_others_never_wait_for_a_requests_rows(links: tuple[float, float]) -> None:
    """KV comes over a link that takes many steps for one request's, on one of the members or on both."""
    pipeline = Pipeline(links=links)
    requests = [a_request(str(i), [3 + i] * 30) for i in range(10)]
    for request in requests:
        pipeline.handle.add(request)
    pipeline.run(20_000)
    pipeline.close()
    assert {request.num_preemptions for request in requests} == {0}
    assert pipeline.parked.queue.num_come > 3, "requests have come back"
    assert pipeline.num_waits_beside == 0


def test_tokens_are_those_of_requests_that_run_alone(pipeline: Pipeline) -> None:
    together, alone = some_requests(12), some_requests(12)
    for request in together:
        pipeline.handle.add(request)
    pipeline.run()
    for request in alone:
        request.request_id += "-alone"
        pipeline.handle.add(request)
        pipeline.run(1 << 20)
    assert [list(r.all_token_ids) for r in together] == [list(r.all_token_ids) for r in alone]


def test_a_full_host_costs_requests_their_kv_and_nothing_else() -> None:
    pipeline, requests = Pipeline(host_blocks=6), some_requests(12)
    for request in requests:
        pipeline.handle.add(request)
    pipeline.run()
    pipeline.close()
    assert [request.num_output_tokens for request in requests] == [40] * 12
    assert sum(request.num_preemptions for request in requests) > 0


def test_parked_by_an_order_means_until_an_order(pipeline: Pipeline) -> None:
    first, second = a_request("a", [5] * 30), a_request("b", [6] * 30)
    pipeline.handle.add(first)
    pipeline.handle.add(second)
    while not first.num_output_tokens:
        pipeline.step()
    assert pipeline.parked.park(["a", "unknown"]) == ["a"]
    pipeline.step()
    pipeline.step()  # it was in a microbatch
    made = first.num_output_tokens
    pipeline.run()
    assert second.num_output_tokens == 40 and first.num_output_tokens == made
    assert pipeline.parked.parked == [first] and is_on_device(pipeline, first), "nothing needed its blocks"
    for request in some_requests(8, seed=2):
        pipeline.handle.add(request)
    pipeline.run()
    assert not is_on_device(pipeline, first) and pipeline.parked.times_away(first) == 1
    num_blocks = len(pipeline.parked.rows_of(first))
    assert pipeline.parked.resume(["a", "b"]) == ["a"]
    pipeline.run()
    assert first.num_output_tokens == 40 and first.num_preemptions == 0
    (pause,) = [pause for pause in pipeline.parked.take_pauses() if pause.request is first]
    block_bytes = LAYERS * pipeline.members[1].world.tiers.pool.block_bytes
    assert pause.swapped_bytes == 2 * num_blocks * block_bytes, "to the host and back, on all stages"


def test_a_request_that_ends_while_it_is_away_leaves_nothing(pipeline: Pipeline) -> None:
    requests = some_requests(12)
    for request in requests:
        pipeline.handle.add(request)
    while not any(pipeline.parked.rows_of(request) for request in requests):
        pipeline.step()
    gone = next(request for request in requests if pipeline.parked.rows_of(request))
    pipeline.abort(gone.request_id)
    assert gone not in pipeline.parked.parked
    pipeline.run()
    assert pipeline.parked.num_parked() == 0
    pipeline.parked._begin(set())
    figures = pipeline.parked.figures()
    assert figures["host_blocks_used"] == len(pipeline.parked.prefixes) and figures["device_blocks_used"] == 0


def test_blocks_that_are_to_be_free_become_so_and_stay_so(pipeline: Pipeline) -> None:
    requests = some_requests(12)
    for request in requests:
        pipeline.handle.add(request)
    for _ in range(60):
        pipeline.step()
    pipeline.parked.keep_free(NUM_BLOCKS // 2)
    prefixes = pipeline.parked.prefixes
    with prefixes.saving():
        prefixes._evicted(1, b"a block's hash")
    assert b"a block's hash" not in prefixes._rows, "a restore does not wait for copies of prefixes"
    for _ in range(20):
        pipeline.step()
        assert pipeline.handle.num_free() >= NUM_BLOCKS // 2 or pipeline.num_steps < 64
    pipeline.parked.keep_free(0)
    pipeline.run()
    assert {request.num_preemptions for request in requests} == {0}


def test_what_keeps_prompts_back_lets_parked_requests_come(pipeline: Pipeline) -> None:
    """A step that an SLO limits to so many new prompts counts those that hold KV: they have come back by then."""
    request = a_request("a", [5] * 30)
    pipeline.handle.add(request)
    while not request.num_output_tokens:
        pipeline.step()
    pipeline.parked.park(["a"])
    while not pipeline.parked.parked:
        pipeline.step()
    pipeline.parked.resume(["a"])
    assert not pipeline.in_flight
    limiting = partial(pipeline.handle.limited, num_new=0)
    output = pipeline.parked.schedule(pipeline.microbatches, [], STAGES_IN_FLIGHT, limiting)
    assert set(output.num_scheduled_tokens) == {"a"}


def test_the_least_urgent_waits_on_the_host() -> None:
    pipeline = Pipeline(by_priority=True)
    urgent, others = a_request("urgent", [7] * 60), some_requests(10)
    for request in others:
        request.priority = 500  # copies take real time, in which the clock of the steps makes parked ones more urgent
        pipeline.handle.add(request)
    for _ in range(40):
        pipeline.step()
    pipeline.handle.add(urgent)
    while urgent.num_output_tokens < 40:
        pipeline.step()
        assert not pipeline.parked.rows_of(urgent)
    pipeline.run()
    pipeline.close()


def next_turn(request: Request, more: int = 5) -> Request:
    """It begins with a conversation so far."""
    return a_request(f"{request.request_id}+", [*request.all_token_ids, *[9] * more], 20)


@pytest.mark.parametrize("links", [(0.0, 0.0), (2e6, 4e6)], ids=["fast", "slow"])
def test_second_turns_begin_with_what_the_host_has_of_the_first(links: tuple[float, float]) -> None:
    pipeline = Pipeline(links=links)
    first = [a_request(str(i), [3 + i] * 40, 20) for i in range(12)]
    for request in first:
        pipeline.handle.add(request)
    pipeline.run(20_000)
    second = [next_turn(request) for request in first]
    for request in second:
        pipeline.handle.add(request)
    pipeline.run(40_000)
    num_kept = 59 // BLOCK_SIZE * BLOCK_SIZE  # the newest token of a request has no KV yet
    found = {name: pipeline.computed[name] for name in (request.request_id for request in second)}
    assert found == dict.fromkeys(found, 65 + 20 - 1 - num_kept), "all full blocks of the first turn are found"
    assert pipeline.members[1].world.tiers.counts.hit_tokens > 6 * num_kept
    assert {request.num_preemptions for request in second} == {0} and pipeline.num_waits_beside == 0
    assert [request.num_output_tokens for request in second] == [20] * 12
    pipeline.close()


def test_a_full_host_keeps_the_newest_prefixes() -> None:
    pipeline = Pipeline(host_blocks=8)
    turns = [a_request(str(i), [3 + i] * 40, 20) for i in range(12)]
    for request in turns:
        pipeline.handle.add(request)
        pipeline.run(20_000)
    assert len(pipeline.parked.prefixes) == pipeline.parked.num_rows
    for request in (turns[9], turns[0]):
        pipeline.handle.add(next_turn(request))
        pipeline.run(20_000)
    assert (pipeline.computed["9+"], pipeline.computed["0+"]) == (65 + 20 - 1 - 56, 65 + 20 - 1)
    assert pipeline.members[1].world.tiers.counts.hit_tokens > 0
    pipeline.close()


@pytest.mark.parametrize("seed", range(6))
def test_any_order_at_any_step(seed: int) -> None:
    """Each step reads its KV where it is. In between requests are parked, resumed, aborted and added, and go on."""
    rng = random.Random(seed)
    pipeline = Pipeline(host_blocks=rng.choice([6, 30, 200]), links=rng.choice([(0.0, 0.0), (2e7, 4e7), (5e8, 4e7)]))
    left, ordered, ended = some_requests(24, seed), set[str](), 0
    turns = {request.request_id: request for request in left}
    while left or pipeline.handle.has_unfinished or pipeline.parked.num_parked() or pipeline.in_flight:
        if left and rng.random() < 0.2:
            pipeline.handle.add(left.pop())
        if rng.random() < 0.1 and pipeline.handle.running:
            ordered.update(pipeline.parked.park([rng.choice(pipeline.handle.running).request_id]))
        if ordered and (rng.random() < 0.1 or not pipeline.handle.has_unfinished):
            chosen = rng.choice(sorted(ordered))
            ordered.discard(chosen)
            pipeline.parked.resume([chosen])
        here = {request.request_id for request in pipeline.handle.requests()}
        under_way = {name for output, *_ in pipeline.in_flight for name in output.num_scheduled_tokens}
        # Also of a microbatch under way: what then gets the blocks comes after it, on each member.
        able = here & under_way if ended % 2 else here - under_way
        if able and ended < 8 and rng.random() < 0.03:
            pipeline.abort(rng.choice(sorted(able)))
            ended += 1
        over = [name for name, request in turns.items() if request.is_finished()]
        for request in map(turns.pop, over):
            if "+" not in request.request_id:
                left.insert(0, next_turn(request, rng.choice([1, 5])))
        pipeline.step()
        assert pipeline.num_steps < 8000, "the requests do not come on"
    pipeline.parked._begin(set())
    figures = pipeline.parked.figures()
    assert figures["host_blocks_used"] == len(pipeline.parked.prefixes) and pipeline.handle.num_free() == NUM_BLOCKS
    pipeline.close()
