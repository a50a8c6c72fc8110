"""Laws of the formation of microbatches, by lookahead and by counting tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.cost_model import Chunk, CostModel
from pengserve.planners.lookahead import (
    MAX_MORE,
    REST,
    SNAP,
    Microbatch,
    MicrobatchLimits,
    Work,
    form_by_tokens,
    form_microbatches,
    next_budget,
    next_by_tokens,
)
from pengserve.planners.types.errors import PlanError

MODEL = CostModel(
    prefix_attention_s=5e-8, self_attention_s=2.5e-8, kv_read_s=5e-7, ffn_s=7e-5, other_s=8e-5, load_s=4e-3
)
TILED = replace(MODEL, tile_tokens=64)
WIDE = MicrobatchLimits(max_tokens=1 << 30, max_requests=1 << 30)
Former = Callable[[Sequence[Work], CostModel, MicrobatchLimits], tuple[Microbatch, ...]]


def prefill(name: str, num: int, prefix: int = 0, since: float = 0.0) -> Work:
    return Work(request_id=name, prefix_tokens=prefix, num_tokens=num, is_prefill=True, since=since)


def decode(name: str, prefix: int, since: float = 0.0) -> Work:
    return Work(request_id=name, prefix_tokens=prefix, num_tokens=1, is_prefill=False, since=since)


@st.composite
def works(draw: st.DrawFn, max_size: int = 30, max_tokens: int = 3000) -> list[Work]:
    count = draw(st.integers(1, max_size))
    kinds = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return [
        Work(
            request_id=f"r{index}",
            prefix_tokens=draw(st.integers(0, max_tokens)),
            num_tokens=draw(st.integers(1, max_tokens if is_prefill else 3)),
            is_prefill=is_prefill,
            since=draw(st.integers(0, 5)),
        )
        for index, is_prefill in enumerate(kinds)
    ]


limits = st.builds(
    MicrobatchLimits, max_tokens=st.integers(3, 4000), max_requests=st.integers(1, 20), min_tokens=st.integers(1, 300)
)
cost_models = st.sampled_from([MODEL, TILED])
formers = st.one_of(
    st.just(form_by_tokens),
    st.one_of(st.none(), st.integers(1, 16)).map(lambda num: lambda w, m, lim: form_microbatches(w, m, lim, num)),
)


def chunks_of(batches: Sequence[Microbatch], request_id: str) -> list[tuple[int, int]]:
    """Half-open ranges of a request's tokens, in the order in which they are computed."""
    found = [work for batch in batches for work in batch.work if work.request_id == request_id]
    return [(work.prefix_tokens, work.prefix_tokens + work.num_tokens) for work in found]


def granule_s(work: Sequence[Work], model: CostModel = MODEL) -> float:
    """The most that two neighbouring cuts can differ by: a decode, or a token's tile and what a cut itself costs."""
    decodes_s = [model.chunk_s(item.chunk) for item in work if not item.is_prefill]
    longest = max(item.prefix_tokens + item.num_tokens for item in work)
    token_s = model.tokens_s(longest, 1) + (model.tile_tokens - 1) * model.prefix_attention_s * longest
    return max([token_s, *decodes_s]) + model.other_s + model.kv_read_s * longest


@given(works(), limits, formers, cost_models)
def test_every_token_is_computed_once_and_in_order(
    work: list[Work], most: MicrobatchLimits, form: Former, model: CostModel
) -> None:
    batches = form(work, model, most)
    for item in work:
        ranges = chunks_of(batches, item.request_id)
        assert (ranges[0][0], ranges[-1][1]) == (item.prefix_tokens, item.prefix_tokens + item.num_tokens)
        assert all(stop == start for (_, stop), (start, _) in pairwise(ranges))
        assert item.is_prefill or len(ranges) == 1


@given(works(), limits, formers)
def test_requests_keep_their_order(work: list[Work], most: MicrobatchLimits, form: Former) -> None:
    served = [item.request_id for batch in form(work, MODEL, most) for item in batch.work]
    assert list(dict.fromkeys(served)) == [item.request_id for item in work]


@given(works(), limits, formers, cost_models)
def test_no_microbatch_is_empty_or_beyond_the_limits(
    work: list[Work], most: MicrobatchLimits, form: Former, model: CostModel
) -> None:
    for batch in form(work, model, most):
        assert batch.work and all(item.num_tokens > 0 for item in batch.work)
        assert len(batch.work) <= most.max_requests
        assert batch.num_tokens <= most.max_tokens
        assert len({item.request_id for item in batch.work}) == len(batch.work)


def test_a_decode_that_does_not_fit_waits_for_the_next_microbatch() -> None:
    drafts = [replace(decode(f"r{i}", 100), num_tokens=3) for i in range(4)]
    most = MicrobatchLimits(max_tokens=5, max_requests=9)
    for batches in (form_by_tokens(drafts, MODEL, most), form_microbatches(drafts, MODEL, most, 1)):
        assert [batch.num_tokens for batch in batches] == [3, 3, 3, 3]
    assert next_by_tokens(drafts, MODEL, most) == next_budget(drafts, [], MODEL, most, max_in_flight=1) == {"r0": 3}


@given(works(), limits, formers, cost_models)
def test_a_microbatch_tells_its_cost(work: list[Work], most: MicrobatchLimits, form: Former, model: CostModel) -> None:
    for batch in form(work, model, most):
        assert batch.cost_s == pytest.approx(model.batch_s(item.chunk for item in batch.work))


@given(works(), st.integers(2, 16), cost_models)
def test_costs_differ_by_little_more_than_what_cannot_be_cut(work: list[Work], num: int, model: CostModel) -> None:
    costs_s = [batch.cost_s - model.load_s for batch in form_microbatches(work, model, WIDE, num)]
    mean_s = sum(costs_s) / num
    assert max(costs_s) <= mean_s * (1 + 4 * SNAP) + 2 * granule_s(work, model)


def test_prompts_are_cut_where_tiles_end() -> None:
    long = [replace(prefill("r0", 2000), prefix_tokens=8000)]
    (first, *_), (plain, *_) = (form_microbatches(long, model, WIDE, 3) for model in (TILED, MODEL))
    assert first.num_tokens % TILED.tile_tokens == 0 and plain.num_tokens % TILED.tile_tokens
    assert next_budget(long, [], TILED, WIDE, max_in_flight=3)["r0"] % TILED.tile_tokens == 0
    short = [prefill("r0", 200)]  # attends to no prefix: nothing is gained by whole tiles
    assert next_budget(short, [], TILED, WIDE, max_in_flight=3) == next_budget(short, [], MODEL, WIDE, max_in_flight=3)


@given(works(max_size=4, max_tokens=8), st.integers(2, 3))
def test_no_other_cuts_are_much_better(work: list[Work], num: int) -> None:
    fine = [replace(item, prefix_tokens=100 * item.prefix_tokens) for item in work]  # attention differs
    ours_s = max(batch.cost_s for batch in form_microbatches(fine, MODEL, WIDE, num))
    best_s = min(max(costs_s) for costs_s in all_partitions(fine, num))
    assert ours_s <= best_s * (1 + 2 * SNAP) + granule_s(fine)


def all_partitions(work: Sequence[Work], num: int) -> list[list[float]]:
    """Costs of the microbatches of every way to cut `work` into at most `num`."""
    tokens = [(index, token) for index, item in enumerate(work) for token in range(item.num_tokens)]
    allowed = [at for at, (index, token) in enumerate(tokens) if at and (work[index].is_prefill or token == 0)]
    found = []
    for count in range(num):
        for cuts in combinations(allowed, count):
            costs_s = []
            for start, stop in pairwise([0, *cuts, len(tokens)]):
                chunks: dict[int, Chunk] = {}
                for index, token in tokens[start:stop]:
                    first = chunks.get(index, Chunk(prefix_tokens=work[index].prefix_tokens + token, num_tokens=0))
                    chunks[index] = replace(first, num_tokens=first.num_tokens + 1)
                costs_s.append(MODEL.batch_s(chunks.values()))
            found.append(costs_s)
    return found


@given(works(), limits)
def test_balance_makes_no_crowd_of_small_microbatches(work: list[Work], most: MicrobatchLimits) -> None:
    prompts = [replace(item, is_prefill=True) for item in work]
    many = len(form_microbatches(prompts, MODEL, replace(most, max_requests=1 << 30), 1))
    least = len(form_by_tokens(prompts, MODEL, replace(most, max_requests=1 << 30)))
    assert many <= 2 * MAX_MORE * least


def test_parts_stop_getting_smaller_at_the_threshold() -> None:
    prompts = [prefill("a", 1000), prefill("b", 600)]
    batches = form_microbatches(prompts, MODEL, replace(WIDE, min_tokens=400))
    assert len(batches) == 4
    assert len(form_microbatches(prompts, MODEL, replace(WIDE, min_tokens=400), 16)) == 4
    assert len(form_microbatches(prompts, MODEL, replace(WIDE, min_tokens=4000), 16)) == 1


def test_a_later_chunk_of_a_long_prompt_is_shorter() -> None:
    batches = form_microbatches([prefill("a", 4000)], MODEL, WIDE, 4)
    tokens = [batch.num_tokens for batch in batches]
    assert tokens == sorted(tokens, reverse=True) and tokens[0] > 1.1 * tokens[-1]


def test_a_cut_that_falls_nearly_between_two_requests_falls_between_them() -> None:
    batches = form_microbatches([prefill("a", 500), prefill("b", 502)], MODEL, WIDE, 2)
    assert [[item.request_id for item in batch.work] for batch in batches] == [["a"], ["b"]]


def test_cheap_tokens_make_all_microbatches_smaller_rather_than_some_cheaper() -> None:
    work = [prefill(f"cheap{i}", 100) for i in range(20)] + [prefill(f"dear{i}", 100, 1500) for i in range(20)]
    most = MicrobatchLimits(max_tokens=500, max_requests=100)
    ours = [batch.cost_s for batch in form_microbatches(work, MODEL, most, 1)]
    theirs = [batch.cost_s for batch in form_by_tokens(work, MODEL, most)]
    assert max(ours) / min(ours) < 1.05 < 1.5 < max(theirs) / min(theirs)


def test_nothing_to_do_gives_no_microbatch() -> None:
    assert form_microbatches([], MODEL, WIDE) == form_by_tokens([], MODEL, WIDE) == ()
    assert next_budget([], [], MODEL, WIDE, max_in_flight=2) == next_by_tokens([], MODEL, WIDE) == {}


def test_work_without_a_token_is_refused() -> None:
    with pytest.raises(PlanError, match="without a token"):
        form_microbatches([prefill("a", 0)], MODEL, WIDE)


@given(works(), limits, st.integers(1, 8), st.lists(st.floats(4e-3, 10), max_size=7))
def test_a_budget_takes_the_first_of_what_is_ready(
    work: list[Work], most: MicrobatchLimits, stages: int, in_flight_s: list[float]
) -> None:
    for budget in (
        next_budget(work, in_flight_s[: stages - 1], MODEL, most, max_in_flight=stages),
        next_by_tokens(work, MODEL, most),
    ):
        order = sorted(work, key=lambda item: (item.is_prefill, item.since))[: len(budget)]
        assert list(budget) == [item.request_id for item in order] and budget
        assert sum(budget.values()) <= most.max_tokens and len(budget) <= most.max_requests
        *whole, last = order
        assert all(budget[item.request_id] == item.num_tokens for item in whole)
        assert 0 < budget[last.request_id] <= last.num_tokens
        assert last.is_prefill or budget[last.request_id] == last.num_tokens


@given(works(), st.integers(2, 8), cost_models)
def test_an_empty_pipeline_is_filled_evenly(work: list[Work], stages: int, model: CostModel) -> None:
    left, costs_s = {item.request_id: item for item in work}, []
    for _ in range(stages):
        budget = next_budget(list(left.values()), costs_s, model, WIDE, max_in_flight=stages)
        taken = [replace(left[name], num_tokens=num) for name, num in budget.items()]
        if taken:
            costs_s.append(model.batch_s(item.chunk for item in taken))
        for name, num in budget.items():
            item = left.pop(name)
            if num < item.num_tokens:
                left[name] = replace(item, prefix_tokens=item.prefix_tokens + num, num_tokens=item.num_tokens - num)
    unforeseen = 2 if model.tile_tokens == 1 else max(2, stages)  # each cut may open a tile more
    assert sum(model.chunk_s(item.chunk) for item in left.values()) <= unforeseen * granule_s(work, model)
    mean_s = sum(cost_s - model.load_s for cost_s in costs_s) / stages
    assert max(costs_s) - model.load_s <= mean_s * (1 + REST) + 2 * granule_s(work, model)


def test_decodes_that_came_back_together_part_again() -> None:
    together = [decode(f"r{i}", 500) for i in range(64)]
    first = next_budget(together, [], MODEL, WIDE, max_in_flight=2)
    assert len(first) == 32
    first_s = MODEL.batch_s(work.chunk for work in together[:32])
    assert len(next_budget(together[32:], [first_s], MODEL, WIDE, max_in_flight=2)) == 32


def test_a_long_queue_gives_microbatches_like_those_in_flight() -> None:
    queue = [prefill(f"r{i}", 37 * (i % 50 + 1)) for i in range(200)]
    most = MicrobatchLimits(max_tokens=512, max_requests=64)
    first = form_microbatches(queue, MODEL, most, 2)[0].cost_s
    budget = next_budget(queue, [first], MODEL, most, max_in_flight=2)
    taken = [replace(item, num_tokens=budget[item.request_id]) for item in queue if item.request_id in budget]
    assert MODEL.batch_s(item.chunk for item in taken) == pytest.approx(first, rel=0.05)


def test_the_oldest_decodes_go_first_and_all_before_prefill() -> None:
    ready = [prefill("new", 3000, since=0.0), decode("young", 100, since=9.0), decode("old", 100, since=1.0)]
    assert list(next_budget(ready, [], MODEL, WIDE, max_in_flight=1)) == ["old", "young", "new"]


def test_a_short_prompt_is_not_cut_to_fill_a_stage() -> None:
    assert next_budget([prefill("a", 60)], [], MODEL, replace(WIDE, min_tokens=64), max_in_flight=4) == {"a": 60}
