"""Laws of the dispatch and admission planners."""

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.admission import MAX_RETRY_S, MIN_RETRY_S, IngressLoad, Refusal, admit
from pengserve.planners.dispatch import Candidate, choose
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
def test_the_choice_fits_and_nothing_that_fits_is_less_loaded(given_: list[Candidate], num_tokens: int) -> None:
    key = choose(given_, num_tokens)
    able = [c for c in given_ if c.capacity_tokens >= num_tokens]
    if key is None:
        assert not able
        return
    (chosen,) = [c for c in able if c.key == key]
    assert all(chosen.virtual_load <= other.virtual_load for other in able)


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
