"""vLLM's own scheduler in a lane: what it does that the fast one does not, and how its pool changes."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm")
from pengserve.planners.cost_model import Chunk
from pengserve.planners.types.errors import ConfigError, PlanError
from pengserve.simulator.clock import run_virtual
from pengserve.simulator.engine.fast_scheduler import FastScheduler
from pengserve.simulator.engine.lane import SimLane
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.pipeline_lane import PipelineLane
from pengserve.simulator.engine.vllm_scheduler import VllmScheduler
from pengserve.simulator.requests import LiveRequest
from tests.simulator.engine.loads import MODEL, LinearTimes, capacity, live

pytestmark = pytest.mark.slow

CACHED = SchedulerOptions(prefix_caching=True)


def run(scheduler: VllmScheduler, request: LiveRequest) -> list[Chunk]:
    """Serves one request to its end; the chunks of its prompt."""
    scheduler.add(request)
    chunks: list[Chunk] = []
    while step := scheduler.schedule():
        chunks += step.batch.prefills
        scheduler.finish(step)
    assert request.is_done
    return chunks


@pytest.mark.parametrize(("size", "width"), [(4, 8), (4, 4), (8, 4), (16, 24)])
def test_equal_prefix_ids_are_computed_once(size: int, width: int) -> None:
    scheduler = VllmScheduler(capacity(num_blocks=100, block_size=size), CACHED)
    ids = tuple(range(50, 50 + 96 // width))
    run(scheduler, live("a", 100, 3, prefix_ids=ids, prefix_block=width))
    same = run(scheduler, live("b", 100, 3, prefix_ids=ids, prefix_block=width))
    assert same == [Chunk(prefix_tokens=96, num_tokens=4)]
    assert scheduler.totals["total_prefix_hits"] == 96
    assert scheduler.totals["total_prefix_queries"] == 200


def test_prefixes_are_shared_as_far_as_their_ids_are() -> None:
    scheduler = VllmScheduler(capacity(num_blocks=100, block_size=4), CACHED)
    run(scheduler, live("a", 100, 3, prefix_ids=(1, 2, 3), prefix_block=32))
    other = run(scheduler, live("b", 100, 3, prefix_ids=(1, 2, 9), prefix_block=32))
    assert other == [Chunk(prefix_tokens=64, num_tokens=36)]


def test_what_requests_would_free_is_known_before_they_go() -> None:
    scheduler = VllmScheduler(capacity(num_blocks=100, block_size=4), CACHED)
    ids = {"a": (1, 2, 3), "b": (1, 2, 9), "stays": (1, 7)}
    requests = {name: live(name, 100, 30, prefix_ids=prefix, prefix_block=32) for name, prefix in ids.items()}
    for request in requests.values():
        scheduler.add(request)
        for _ in range(2):  # its prompt, so that the next one finds it, and a token
            step = scheduler.schedule()
            assert step is not None
            scheduler.finish(step)
    going = [requests["a"], requests["b"]]
    (own, _), *_ = scheduler.blocks_freed(going[:1])
    (num_a, shared_a), (num_b, shared_b) = scheduler.blocks_freed(going)
    assert own == num_a and len(shared_a) == 8, "32 tokens are those of all three, 32 more of a and b"
    assert sorted(shared_a) == sorted(shared_b)
    before = scheduler.num_free
    scheduler.remove(going[:1])
    assert scheduler.num_free == before + num_a
    scheduler.remove(going[1:])
    assert scheduler.num_free == before + num_a + num_b + 8


def test_requests_without_prefix_ids_share_nothing() -> None:
    scheduler = VllmScheduler(capacity(num_blocks=100, block_size=4), CACHED)
    for name in ("a", "b"):
        assert run(scheduler, live(name, 100, 3)) == [Chunk(prefix_tokens=0, num_tokens=100)]


def test_prefix_ids_are_nothing_without_prefix_caching() -> None:
    scheduler = VllmScheduler(capacity(num_blocks=100, block_size=4))
    for name in ("a", "b"):
        prompt = run(scheduler, live(name, 100, 3, prefix_ids=(1, 2, 3), prefix_block=32))
        assert prompt == [Chunk(prefix_tokens=0, num_tokens=100)]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    def recomputed(options: SchedulerOptions) -> int:
        scheduler = VllmScheduler(capacity(num_blocks=9, block_size=4), options)
        for name in ("a", "b"):
            scheduler.add(live(name, 8, 16))
        tokens = 0
        while step := scheduler.schedule():
            tokens += sum(chunk.num_tokens for chunk in step.batch.prefills)
            scheduler.finish(step)
        assert scheduler.totals["total_preemptions"] > 0
        return tokens

    assert recomputed(CACHED) < recomputed(SchedulerOptions())


@pytest.mark.parametrize("options", [CACHED, SchedulerOptions()])
def test_a_pool_shrinks_to_what_is_in_use_and_grows_beyond_what_it_was(options: SchedulerOptions) -> None:
    room = capacity(num_blocks=10, block_size=4, max_model_len=1000)
    scheduler = VllmScheduler(room, options)
    first = live("a", 8, 9)
    scheduler.add(first)
    step = scheduler.schedule()
    assert step is not None
    scheduler.finish(step)
    assert not scheduler.resize(1)
    assert scheduler.resize(2)
    assert (scheduler.num_blocks, scheduler.num_free) == (2, 0)
    assert scheduler.resize(60)
    assert scheduler.num_free == 58
    run(scheduler, live("long", 200, 20))
    assert first.is_done
    assert scheduler.num_free == 60


def test_a_request_that_comes_with_its_kv_computes_no_prompt() -> None:
    scheduler = VllmScheduler(capacity(), CACHED)
    moved = live("a", 30, 10)
    moved.num_generated = 4
    assert scheduler.admit(moved, 33)
    assert scheduler.running == [moved]
    step = scheduler.schedule()
    assert step is not None
    assert (step.batch.num_decodes, step.batch.context_tokens, step.batch.prefills) == (1, 34, ())
    scheduler.finish(step)
    assert (moved.num_generated, scheduler.computed_tokens(moved)) == (5, 34)


@pytest.mark.parametrize("options", [{}, {"num_stages": 3}, {"num_stages": 2, "lookahead": MODEL}])
def test_lanes_serve_the_same_with_both_schedulers(options: dict[str, Any]) -> None:
    async def main(kind: type) -> list[Any]:
        ended: list[LiveRequest] = []
        scheduler = kind(capacity(num_blocks=120, block_size=4), SchedulerOptions(max_num_batched_tokens=64, **options))
        if scheduler.options.num_stages > 1:
            lane: SimLane = PipelineLane(scheduler, LinearTimes(), on_end=ended.extend, transfer_s=lambda batch: 1e-4)
        else:
            lane = SimLane(scheduler, LinearTimes(), on_end=ended.extend)
        for index in range(40):
            lane.add(live(f"r{index}", 5 + 37 * index % 150, 1 + 11 * index % 60, at_s=float(index)))
            await asyncio.sleep(0.05)
        await asyncio.sleep(1000.0)
        assert len(ended) == 40
        ended.sort(key=lambda request: request.request_id)
        return [(r.scheduled_s, r.first_token_s, r.last_token_s, r.num_preemptions) for r in ended]

    for vllm, fast in zip(run_virtual(main(VllmScheduler)), run_virtual(main(FastScheduler)), strict=True):
        assert vllm == pytest.approx(fast)


def test_what_vllm_cannot_do_is_said() -> None:
    with pytest.raises(ConfigError, match="vLLM needs at least max_num_seqs, 8"):
        VllmScheduler(capacity(), SchedulerOptions(max_num_batched_tokens=4))
    with pytest.raises(ConfigError, match="preempts by recompute alone"):
        VllmScheduler(capacity(), SchedulerOptions(preemption="swap"))


def test_steps_beyond_the_stages_are_refused() -> None:
    scheduler = VllmScheduler(capacity())
    scheduler.add(live("a", 5, 5))
    assert scheduler.schedule() is not None
    with pytest.raises(PlanError, match="1 steps are unfinished"):
        scheduler.schedule()
