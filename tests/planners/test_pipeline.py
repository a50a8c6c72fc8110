"""Laws of the pipeline in virtual time, and what lookahead is worth in it."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.cost_model import CostModel
from pengserve.planners.lookahead import (
    Microbatch,
    MicrobatchLimits,
    Work,
    form_by_tokens,
    form_microbatches,
    next_budget,
    next_by_tokens,
)
from pengserve.planners.pipeline import Bubble, Former, Job, serve, simulate
from pengserve.planners.types.errors import PlanError

MODEL = CostModel(
    prefix_attention_s=5e-8, self_attention_s=2.6e-8, kv_read_s=5e-7, ffn_s=7.5e-5, other_s=7e-5, load_s=4.5e-3
)
DEEP = CostModel(  # twelve layers, of which a pipeline of two is large enough to be measured on a CPU
    prefix_attention_s=3e-7, self_attention_s=1.9e-7, kv_read_s=4.6e-6, ffn_s=3.7e-4, other_s=4.1e-5, load_s=1.6e-2
)
PER_TOKEN = CostModel(prefix_attention_s=0, self_attention_s=0, kv_read_s=0, ffn_s=1.0, other_s=0, load_s=0)
LIMITS = MicrobatchLimits(max_tokens=512, max_requests=64, min_tokens=32)


def batch(*pairs: tuple[str, int], is_prefill: bool = True) -> Microbatch:
    """Requests and their new tokens; a token takes a second."""
    work = tuple(Work(request_id=r, prefix_tokens=0, num_tokens=num, is_prefill=is_prefill) for r, num in pairs)
    return Microbatch(work=work, cost_s=PER_TOKEN.batch_s(item.chunk for item in work))


def jobs(count: int, most_tokens: int, outputs: tuple[int, int] = (8, 64), seed: int = 1) -> list[Job]:
    """Prompts of very different lengths, all there at once."""
    source = random.Random(seed)
    return [
        Job(
            request_id=f"r{index}",
            prompt_tokens=round(16 * (most_tokens / 16) ** source.random()),
            output_tokens=source.randint(*outputs),
        )
        for index in range(count)
    ]


def lookahead(stages: int, limits: MicrobatchLimits = LIMITS, model: CostModel = MODEL) -> Former:
    return partial(next_budget, model=model, limits=limits, max_in_flight=stages)


def by_tokens(limits: MicrobatchLimits = LIMITS) -> Former:
    return lambda ready, in_flight_s: next_by_tokens(ready, MODEL, limits)


class Watched:
    """A former, and what it was asked."""

    def __init__(self, former: Former) -> None:
        self._former = former
        self.computed: Counter[str] = Counter()
        self.most_ready = self.most_in_flight = 0

    def __call__(self, ready: Sequence[Work], in_flight_s: Sequence[float]) -> Mapping[str, int]:
        self.most_ready = max(self.most_ready, len(ready))
        self.most_in_flight = max(self.most_in_flight, len(in_flight_s))
        budget = self._former(ready, in_flight_s)
        self.computed.update(budget)
        return budget


some_jobs = st.lists(
    st.tuples(st.integers(1, 2000), st.integers(1, 6), st.floats(0, 1)),
    min_size=1,
    max_size=12,
).map(
    lambda rows: [
        Job(request_id=f"r{i}", prompt_tokens=prompt, output_tokens=output, arrival_s=arrival_s)
        for i, (prompt, output, arrival_s) in enumerate(rows)
    ]
)


def test_equal_microbatches_leave_no_bubble() -> None:
    found = simulate([batch((f"r{i}", 6)) for i in range(10)], 3, PER_TOKEN)
    assert found == Bubble(share=pytest.approx(0.0), makespan_s=pytest.approx((10 + 2) * 2), num_microbatches=10)


def test_a_long_microbatch_lets_the_next_stage_wait_and_the_stage_before_be_waited_for() -> None:
    # stage 0: |a 0-1||b 1-4||c 4-5|      stage 1: |a 1-2|  idle  |b 4-7||c 7-8|
    found = simulate([batch(("a", 2)), batch(("b", 6)), batch(("c", 2))], 2, PER_TOKEN)
    assert found.makespan_s == pytest.approx(8)
    assert found.share == pytest.approx(2 / (5 + 7))


def test_a_decode_enters_when_the_token_before_it_has_come_back() -> None:
    # stage 0: |p 0-2|  idle  |d 4-5|      stage 1: |p 2-4| idle |d 5-6|
    after_prefill = [batch(("a", 4)), batch(("a", 2), is_prefill=False)]
    found = simulate(after_prefill, 2, PER_TOKEN)
    assert (found.makespan_s, found.share) == (pytest.approx(6), pytest.approx(3 / 9))
    next_chunk = [batch(("a", 4)), batch(("a", 2))]
    assert simulate(next_chunk, 2, PER_TOKEN).makespan_s == pytest.approx(5)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 6))
def test_a_bubble_is_what_work_does_not_fill(tokens: list[int], stages: int) -> None:
    found = simulate([batch((f"r{i}", num)) for i, num in enumerate(tokens)], stages, PER_TOKEN)
    assert 0 <= found.share < 1
    assert found.makespan_s >= sum(tokens) / stages + (stages - 1) * min(tokens) / stages - 1e-9
    assert stages > 1 or found.share == pytest.approx(0, abs=1e-9)


@given(some_jobs, st.integers(1, 4), st.integers(1, 12))
def test_every_token_of_every_request_is_computed(given_: list[Job], stages: int, max_running: int) -> None:
    for former in (lookahead(stages), by_tokens()):
        watched = Watched(former)
        _, whole = serve(given_, watched, stages, MODEL, max_running)
        assert watched.computed == {job.request_id: job.prompt_tokens + job.output_tokens - 1 for job in given_}
        assert watched.most_ready <= max_running and watched.most_in_flight < stages
        assert 0 <= whole.share < 1


def test_a_former_that_never_chooses_is_refused() -> None:
    with pytest.raises(PlanError, match="no work was chosen"):
        serve(jobs(1, 100), lambda ready, in_flight_s: {}, 2, MODEL)


def test_one_stage_is_busy_as_long_as_there_is_work() -> None:
    _, whole = serve(jobs(20, 500), lookahead(1), 1, MODEL)
    assert whole.share == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(("most_tokens", "max_tokens"), [(1900, 512), (8000, 512), (8000, 2048)])
def test_lookahead_at_least_halves_the_bubble_of_a_mixed_load(stages: int, most_tokens: int, max_tokens: int) -> None:
    load = jobs(100, most_tokens)
    limits = MicrobatchLimits(max_tokens=max_tokens, max_requests=64, min_tokens=32)
    before = serve(load, by_tokens(limits), stages, MODEL, max_running=64)
    after = serve(load, lookahead(stages, limits), stages, MODEL, max_running=64)
    for baseline, ours in zip(before, after, strict=True):
        assert ours.share <= baseline.share / 2
        assert ours.makespan_s < baseline.makespan_s


@pytest.mark.parametrize(("stages", "most"), [(2, 0.25), (4, 0.4)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_short_prompts_beside_cheap_decodes_leave_few_bubbles_too(stages: int, most: float, seed: int) -> None:
    load, limits = jobs(100, 900, seed=seed), MicrobatchLimits(max_tokens=512, max_requests=32, min_tokens=32)
    before, _ = serve(load, by_tokens(limits), stages, DEEP, max_running=32)
    after, _ = serve(load, lookahead(stages, limits, DEEP), stages, DEEP, max_running=32)
    assert after.share <= most * before.share


def test_prompts_of_one_queue_pass_without_a_bubble() -> None:
    prompts = [
        Work(request_id=job.request_id, prefix_tokens=0, num_tokens=job.prompt_tokens, is_prefill=True)
        for job in jobs(100, 8000)
    ]
    before = simulate(form_by_tokens(prompts, MODEL, LIMITS), 4, MODEL)
    after = simulate(form_microbatches(prompts, MODEL, LIMITS, 4), 4, MODEL)
    assert after.share <= before.share / 2
