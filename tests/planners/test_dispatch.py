"""Laws of the dispatch and admission planners."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pengserve.planners.admission import MAX_RETRY_S, MIN_RETRY_S, IngressLoad, Refusal, admit
from pengserve.planners.dispatch import (
    MIN_HIT_TOKENS,
    MIN_WAIT_TOKENS,
    MOST_AHEAD,
    PREFILL_WEIGHT,
    SESSION_SHARE,
    Candidate,
    DispatchOptions,
    choose,
    expected_hits,
)
from pengserve.planners.types.ids import InstanceId, InstanceKey

tokens = st.integers(0, 100_000)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    ids = draw(st.lists(st.integers(0, 50), min_size=0, max_size=8, unique=True))
    return [
        Candidate(
            key=InstanceKey(instance_id=InstanceId(i), incarnation=draw(st.integers(0, 3))),
            resident_tokens=draw(tokens),
            queued_tokens=draw(tokens),
            unseen_tokens=draw(tokens),
            capacity_tokens=draw(st.integers(1, 100_000)),
            num_requests=draw(st.integers(0, 500)),
        )
        for i in ids
    ]


@given(candidates(), tokens)
def test_the_choice_fits_and_nothing_that_fits_has_less_pressure(given_: list[Candidate], num_tokens: int) -> None:
    key = choose(given_, num_tokens)
    able = [c for c in given_ if c.capacity_tokens >= num_tokens]
    if key is None:
        assert not able
        return
    (chosen,) = [c for c in able if c.key == key]
    assert all(chosen.pressure <= other.pressure for other in able)


@given(candidates(), tokens, st.randoms())
def test_the_choice_does_not_depend_on_the_order(given_: list[Candidate], num_tokens: int, random_: object) -> None:
    shuffled = list(given_)
    random_.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(shuffled, num_tokens) == choose(given_, num_tokens)


@given(st.integers(2, 6), st.integers(1, 200))
def test_equal_requests_spread_evenly(num_instances: int, num_requests: int) -> None:
    unseen = [0] * num_instances
    for _ in range(num_requests):
        key = choose(
            [
                Candidate(
                    key=InstanceKey(instance_id=InstanceId(i), incarnation=0),
                    resident_tokens=0,
                    queued_tokens=0,
                    unseen_tokens=10 * n,
                    capacity_tokens=100_000,
                    num_requests=n,
                )
                for i, n in enumerate(unseen)
            ],
            10,
        )
        assert key is not None
        unseen[key.instance_id] += 1
    assert max(unseen) - min(unseen) <= 1


@pytest.mark.parametrize(("weight", "expected"), [(PREFILL_WEIGHT, 1), (1.0, 0)])
def test_a_request_goes_where_a_slot_is_free_though_more_memory_is_held_there(weight: float, expected: int) -> None:
    """By load alone, as plain vLLM is dispatched, it would wait where all slots are taken."""
    full, free = (
        Candidate(
            key=InstanceKey(instance_id=InstanceId(i), incarnation=0),
            resident_tokens=held,
            queued_tokens=0,
            unseen_tokens=0,
            capacity_tokens=100_000,
            num_requests=count,
            num_slots=256,
            weight=weight,
        )
        for i, (held, count) in enumerate(((50_000, 256), (51_000, 250)))
    )
    assert choose([full, free], 100) == (full, free)[expected].key


shaped = st.builds(
    Candidate,
    key=st.builds(InstanceKey, instance_id=st.integers(0, 50).map(InstanceId), incarnation=st.just(0)),
    resident_tokens=st.integers(0, 4000),
    queued_tokens=st.integers(0, 100),
    unseen_tokens=st.integers(0, 100),
    capacity_tokens=st.integers(1000, 4000),
    num_requests=st.integers(0, 20),
    shape=st.sampled_from(["dp", "dp", "tp2", "tp4"]),
    max_tokens=st.one_of(st.none(), st.integers(500, 4000)),
    num_priority=st.integers(0, 2),
    num_slots=st.sampled_from([0, 8, 256]),
)
routes = st.lists(shaped, max_size=8, unique_by=lambda c: c.key)
request_options = st.builds(
    DispatchOptions,
    degree=st.sampled_from([None, None, 1, 2, 4]),
    total_tokens=st.integers(0, 5000),
    is_priority=st.booleans(),
)


def at(shape: str, instance_id: int, load: int = 0) -> Candidate:
    return Candidate(
        key=InstanceKey(instance_id=InstanceId(instance_id), incarnation=0),
        resident_tokens=load,
        queued_tokens=0,
        unseen_tokens=0,
        capacity_tokens=100,
        num_requests=0,
        shape=shape,
    )


def find(given_: list[Candidate], key: InstanceKey | None) -> Candidate | None:
    return next((c for c in given_ if c.key == key), None)


@given(routes, st.integers(0, 5000), request_options)
def test_a_wish_is_kept_or_nobody_is_chosen(given_: list[Candidate], num_tokens: int, options: DispatchOptions) -> None:
    needed = max(num_tokens, options.total_tokens)
    able = [c for c in given_ if options.degree in (None, c.degree) and c.holds(needed)]
    chosen = find(given_, choose(given_, num_tokens, options))
    assert (chosen is None) == (not able)
    if chosen is not None:
        assert chosen in able
        assert needed <= chosen.capacity_tokens
        assert chosen.max_tokens is None or needed <= chosen.max_tokens


@given(routes, request_options)
def test_a_priority_request_gets_the_widest_shape_that_is_not_full(
    given_: list[Candidate], options: DispatchOptions
) -> None:
    options = DispatchOptions(degree=options.degree, total_tokens=options.total_tokens, is_priority=True)
    chosen = find(given_, choose(given_, 0, options))
    if chosen is not None:
        able = [c for c in given_ if options.degree in (None, c.degree) and c.holds(options.total_tokens)]
        free = [c for c in able if c.virtual_load < 1] or able
        assert chosen.degree == max(c.degree for c in free)
        assert chosen.pressure == min(c.pressure for c in free if c.degree == chosen.degree)


@given(routes)
@example([replace(at("dp", 0), num_requests=17, num_slots=8), replace(at("tp2", 1), num_priority=1)])  # no slot is free
def test_best_effort_leaves_a_priority_group_alone_while_others_have_room(given_: list[Candidate]) -> None:
    chosen = find(given_, choose(given_, 0))
    is_reserved = [c.num_priority > 0 and c.degree > 1 for c in given_]
    has_room = [not r and c.virtual_load < 1 for r, c in zip(is_reserved, given_, strict=True)]
    if chosen is not None and any(has_room):
        assert not (chosen.num_priority and chosen.degree > 1)


def two(first_queue: int, second_queue: int) -> list[Candidate]:
    """Two instances that differ in their queues alone."""
    return [
        Candidate(
            key=InstanceKey(instance_id=InstanceId(i), incarnation=0),
            resident_tokens=20_000,
            queued_tokens=queue,
            unseen_tokens=0,
            capacity_tokens=100_000,
            num_requests=4,
        )
        for i, queue in enumerate((first_queue, second_queue))
    ]


def weighed(candidate: Candidate) -> float:
    """What its queue counts beside resident tokens."""
    queue = candidate.queued_tokens
    return queue + (candidate.weight - 1) * max(0, queue - MIN_WAIT_TOKENS)


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 20_000))
def test_a_hit_is_worth_a_queue_of_as_many_tokens_and_one_step_and_no_more(first: int, second: int, hit: int) -> None:
    one, other = two(first, second)
    key = choose([one, other], 20_000, hits={other.key: hit})
    worth = other.weight * hit if hit >= MIN_HIT_TOKENS else 0  # below that requests spread as if nothing were there
    assert key == (other.key if weighed(other) - worth < weighed(one) else one.key)
    if second >= first + hit + MIN_WAIT_TOKENS:
        assert key == one.key


@pytest.mark.parametrize("num_tokens", [200, 2000, 8000])
def test_equal_prompts_do_not_all_gather_at_one_instance_while_others_idle(num_tokens: int) -> None:
    """They share the KV of their prompt: memory and computing alone would send all of them where the first is."""
    counts = dict.fromkeys((InstanceKey(instance_id=InstanceId(i), incarnation=0) for i in range(4)), 0)
    hits: dict[InstanceKey, int] = {}
    for _ in range(400):
        given_ = [
            Candidate(
                key=key,
                resident_tokens=num_tokens + 20 * count if count else 0,
                queued_tokens=0,
                unseen_tokens=0,
                capacity_tokens=100_000,
                num_requests=count,
            )
            for key, count in counts.items()
        ]
        key = choose(given_, num_tokens, hits=hits)
        assert key is not None
        counts[key] += 1
        hits[key] = num_tokens
        assert max(counts.values()) - min(counts.values()) <= MOST_AHEAD + 1, counts
    assert min(counts.values()) >= 100 - MOST_AHEAD


def test_what_was_sent_to_a_prefix_cache_takes_memory_and_no_computing() -> None:
    base, _ = two(0, 0)
    cached = replace(base, unseen_tokens=8000, unseen_hit_tokens=8000)
    computed = replace(base, unseen_tokens=8000)
    assert cached.virtual_load == computed.virtual_load > base.virtual_load
    assert base.pressure < cached.pressure < computed.pressure
    assert cached.pressure == replace(base, resident_tokens=base.resident_tokens + 8000).pressure


@given(st.integers(0, 20_000), st.integers(0, 20_000))
def test_a_token_to_be_computed_delays_more_than_one_that_is_there(pending: int, resident: int) -> None:
    one, other = two(pending, 0)
    other = replace(other, resident_tokens=one.resident_tokens + resident)
    assert choose([one, other], 0) == (one.key if weighed(one) <= resident else other.key)


@given(st.integers(1, 16), st.integers(30, 120))
def test_short_requests_that_ended_together_are_replaced_where_they_ended(num_ended: int, num_tokens: int) -> None:
    """Else one instance decodes more requests than the other, for as long as they last."""
    one, other = (replace(c, resident_tokens=num_ended * num_tokens) for c in two(0, 0))
    one = replace(one, resident_tokens=0, num_requests=0)
    for _ in range(num_ended):
        assert choose([one, other], num_tokens) == one.key
        one = replace(one, unseen_tokens=one.unseen_tokens + num_tokens, num_requests=one.num_requests + 1)


def test_homes_count_as_far_as_no_instance_is_known_to_hold_more() -> None:
    at, other = (InstanceKey(instance_id=InstanceId(i), incarnation=0) for i in range(2))
    assert expected_hits({at: 100}, None, 1000, {other: 128}) == {at: 100, other: 128}
    assert expected_hits({at: 200}, None, 1000, {other: 128, at: 64}) == {at: 200}


@given(st.integers(0, 5000), st.integers(0, 5000), st.booleans())
def test_a_session_counts_as_a_part_of_the_prompt_where_no_more_is_known(
    tokens: int, known: int, is_known: bool
) -> None:
    at = InstanceKey(instance_id=InstanceId(1), incarnation=0)
    hits = {at: known} if is_known else {}
    assert expected_hits(hits, None, tokens) == hits
    assert expected_hits(hits, at, tokens).get(at, 0) == max(hits.get(at, 0), int(SESSION_SHARE * tokens))


def test_parallelism_is_read_by_name() -> None:
    read = {text: DispatchOptions.parse(text, (2, 4)).degree for text in ("auto", "dp", "tp", "tp2", " TP4 ")}
    assert read == {"auto": None, "dp": 1, "tp": 4, "tp2": 2, " TP4 ": 4}


@pytest.mark.parametrize("text", ["tp8", "tp1", "tp0", "tp-2", "", "pp2", "dp2", "tp 2", "2", "tp²"])
def test_what_cannot_be_is_refused_with_what_can(text: str) -> None:
    with pytest.raises(ValueError, match=r"choose auto, dp, tp, tp2, tp4$"):
        DispatchOptions.parse(text, (1, 2, 4))
    with pytest.raises(ValueError, match=r"choose auto, dp$"):
        DispatchOptions.parse("tp", ())


loads = st.builds(
    IngressLoad,
    num_in_flight=st.integers(0, 5000),
    num_slots=st.integers(0, 5000),
    num_ingresses=st.integers(1, 8),
    max_queued=st.integers(1, 1000),
    finished_per_s=st.floats(0, 1e4),
    is_draining=st.booleans(),
)


@given(loads, st.integers(1, 200))
def test_a_refusal_says_when_to_come_back(load: IngressLoad, num_sequences: int) -> None:
    admission = admit(load, num_sequences)
    if admission.refusal is None:
        assert not load.is_draining
        assert load.num_in_flight + num_sequences <= load.num_slots + 1 + load.max_queued
    else:
        assert MIN_RETRY_S <= admission.retry_after_s <= MAX_RETRY_S


@given(loads, st.integers(1, 200))
def test_who_was_refused_is_refused_with_more_in_flight(load: IngressLoad, num_sequences: int) -> None:
    if admit(load, num_sequences).refusal is Refusal.OVERLOAD:
        assert admit(load, num_sequences + 1).refusal is Refusal.OVERLOAD


def test_a_pipeline_serves_who_asks_for_dp_and_nobody_who_asks_for_tp() -> None:
    pp, tp = at("pp2", 0), at("tp2", 1)
    assert choose([pp, tp], 1, DispatchOptions(degree=1)) == pp.key
    assert choose([pp, tp], 1, DispatchOptions(degree=2)) == tp.key
    assert choose([pp], 1, DispatchOptions(degree=2)) is None


def test_an_urgent_request_prefers_a_tp_group_to_a_wider_pipeline() -> None:
    assert (
        choose([at("pp4", 0), at("tp2", 1, 50), at("dp", 2)], 1, DispatchOptions(is_priority=True)) == at("tp2", 1).key
    )


def test_a_pipeline_with_urgent_requests_is_left_to_nobody() -> None:
    """It may be all there is while memory is short."""
    busy = replace(at("pp2", 0, 10), num_priority=1)
    assert choose([busy, at("dp", 1, 50)], 1) == busy.key
