"""The law of the route index: whatever was updated and forgotten before, it answers as `choose` does."""

import time
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.planners.dispatch import Candidate, DispatchOptions, choose
from pengserve.planners.route_index import RouteIndex
from pengserve.planners.types.ids import InstanceId, InstanceKey
from tests.support.effort import examples

KEYS = st.builds(InstanceKey, instance_id=st.integers(0, 12).map(InstanceId), incarnation=st.sampled_from([1, 1, 1, 2]))
# Few values, so that ties are common; loads of 2**-60 are lost in the sum with what is kept for priority requests.
CANDIDATES = st.builds(
    Candidate,
    key=KEYS,
    resident_tokens=st.sampled_from([0, 0, 1, 500, 1000, 1500, 4000]),
    queued_tokens=st.sampled_from([0, 0, 7, 4000]),
    unseen_tokens=st.sampled_from([0, 0, 1, 300]),
    capacity_tokens=st.sampled_from([0, 1, 1000, 1023, 1024, 4000, 1 << 60]),
    num_requests=st.sampled_from([0, 0, 1, 2, 20, 40]),
    unseen_hit_tokens=st.sampled_from([0, 0, 1]),
    prefilling_tokens=st.sampled_from([0, 0, 0, 300]),
    shape=st.sampled_from(["dp", "dp", "tp2", "tp4", "pp2"]),
    max_tokens=st.sampled_from([None, None, 0, -1, 512, 1000, 1024, 4096]),
    num_priority=st.sampled_from([0, 0, 1]),
)
CALLS = st.lists(st.one_of(CANDIDATES, KEYS), max_size=40)  # a key is forgotten
TOKENS = st.sampled_from([0, 1, 511, 512, 700, 1000, 1001, 1023, 1024, 4000, 5000])
WISHES = st.builds(
    DispatchOptions,
    degree=st.sampled_from([None, None, None, 1, 2, 4, 8]),
    total_tokens=TOKENS,
    is_priority=st.booleans(),
)


HITS = st.one_of(st.just({}), st.dictionaries(KEYS, st.sampled_from([0, 64, 300, 1024]), max_size=4))


@settings(max_examples=examples(1000))
@given(CALLS, st.lists(st.tuples(TOKENS, WISHES, HITS), min_size=1, max_size=6))
def test_it_answers_as_choose_does(
    calls: list[Candidate | InstanceKey], asked: list[tuple[int, DispatchOptions, dict[InstanceKey, int]]]
) -> None:
    index, known = RouteIndex(), {}
    for call in calls:
        if isinstance(call, Candidate):
            index.update(call)
            known[call.key] = call
        else:
            index.forget(call)
            known.pop(call, None)
        assert len(index) == len(known) and (call in index) == (call in known)
        for num_tokens, options, hits in asked:
            assert index.choose(num_tokens, options, hits) == choose(tuple(known.values()), num_tokens, options, hits)


def test_an_empty_index_has_no_choice() -> None:
    assert RouteIndex().choose(1) is None


def candidate(instance_id: int, load: int, num_requests: int) -> Candidate:
    return Candidate(
        key=InstanceKey(instance_id=InstanceId(instance_id), incarnation=1),
        resident_tokens=load,
        queued_tokens=0,
        unseen_tokens=0,
        capacity_tokens=100_000,
        num_requests=num_requests,
        max_tokens=8192,
    )


def request_s(num_routes: int, num_requests: int = 1000) -> float:
    """The least time of a request: a choice, and an update of the route that it went to."""
    random, index, loads = Random(num_routes), RouteIndex(), {}
    for i in range(num_routes):
        loads[i] = random.randrange(50_000)
        index.update(candidate(i, loads[i], 1))
    least_s = float("inf")
    for _ in range(5):
        start_s = time.thread_time()
        for _ in range(num_requests):
            key = index.choose(100)
            assert key is not None
            loads[key.instance_id] += 100
            index.update(candidate(key.instance_id, loads[key.instance_id], 1))
        least_s = min(least_s, (time.thread_time() - start_s) / num_requests)
    return least_s


def test_a_request_costs_as_much_among_many_routes_as_among_few() -> None:
    few_s, many_s = request_s(8), request_s(4000)
    print(f"a request among 8 routes: {few_s * 1e6:.1f} us, among 4000: {many_s * 1e6:.1f} us")
    assert many_s < 10 * few_s  # a scan of 4000 costs some hundred times that of 8
