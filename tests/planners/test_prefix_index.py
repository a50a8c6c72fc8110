"""Laws of the prefix index: what it answers is what was noted, longest prefixes first to stay, within its bounds."""

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from pengserve.planners.prefix_index import PrefixIndex, home_of, homes
from pengserve.planners.types.ids import InstanceId, InstanceKey
from tests.support.effort import examples

KEYS = st.builds(InstanceKey, instance_id=st.integers(0, 4).map(InstanceId), incarnation=st.just(1))
# Words of few letters, so that prompts share prefixes; a granule's hash stands for all before it.
PROMPTS = st.lists(st.integers(0, 2), max_size=8).map(
    lambda letters: tuple(accumulate(letters, lambda entry, letter: entry * 3 + letter + 1, initial=7))
)
NOTES = st.lists(st.tuples(KEYS, PROMPTS), max_size=30)


def shared(prompt: tuple[int, ...], others: list[tuple[int, ...]]) -> int:
    """Granules of the longest prefix of `prompt` that one of `others` begins with."""
    return max((sum(a == b for a, b in zip(prompt, other, strict=False)) for other in others), default=0)


@settings(max_examples=examples(400))
@given(NOTES, PROMPTS)
def test_with_room_it_finds_the_longest_prefix_that_was_sent_to_each_route(
    notes: list[tuple[InstanceKey, tuple[int, ...]]], prompt: tuple[int, ...]
) -> None:
    index = PrefixIndex()
    sent: dict[InstanceKey, list[tuple[int, ...]]] = {}
    for key, noted in notes:
        index.note(key, noted, 1000)
        sent.setdefault(key, []).append(noted)
    found = {key: shared(prompt, prompts) for key, prompts in sent.items()}
    assert index.hits(prompt) == {key: count for key, count in found.items() if count}
    assert all(index.hits_at(key, prompt) == count for key, count in found.items())


@settings(max_examples=examples(400))
@given(NOTES, PROMPTS, st.integers(0, 12), st.integers(0, 40))
def test_it_keeps_within_its_bounds_and_never_finds_more_than_was_sent(
    notes: list[tuple[InstanceKey, tuple[int, ...]]], prompt: tuple[int, ...], most: int, max_entries: int
) -> None:
    index, free = PrefixIndex(max_entries), PrefixIndex()
    for key, noted in notes:
        index.note(key, noted, most)
        free.note(key, noted, 1000)
        assert len(index) <= max_entries and len(index) <= most * 5
    hits, true = index.hits(prompt), free.hits(prompt)
    assert all(0 < count <= true[key] for key, count in hits.items())


def test_the_end_of_what_was_used_longest_ago_goes_first() -> None:
    index, key = PrefixIndex(), InstanceKey(instance_id=InstanceId(0), incarnation=1)
    old, new = tuple(range(10, 16)), tuple(range(20, 26))
    index.note(key, old, 8)
    index.note(key, new, 8)
    assert index.hits(new) == {key: 6} and index.hits(old) == {key: 2}


def test_homes_agree_and_stay_where_they_are_when_a_route_goes() -> None:
    keys = [InstanceKey(instance_id=InstanceId(i), incarnation=1) for i in range(5)]
    before = {entry: home_of(entry, keys) for entry in range(1000)}
    assert all(home_of(entry, keys[::-1]) == home for entry, home in before.items())
    assert min(list(before.values()).count(key) for key in keys) > 100
    assert all(home_of(entry, keys[1:]) == home for entry, home in before.items() if home != keys[0])


def test_prompts_that_share_much_have_the_same_deep_home() -> None:
    keys = [InstanceKey(instance_id=InstanceId(i), incarnation=1) for i in range(50)]
    one, other = tuple(range(70)), (*range(66), *range(100, 150))
    assert homes(one, keys) == homes(other, keys) and max(homes(one, keys).values()) == 64
    assert list(homes(one[:3], keys).values()) == [1] and homes((), keys) == homes(one, []) == {}


def test_a_route_that_is_forgotten_holds_nothing() -> None:
    index = PrefixIndex()
    keys = [InstanceKey(instance_id=InstanceId(i), incarnation=1) for i in range(2)]
    for key in keys:
        index.note(key, (1, 2, 3), 8)
    index.forget(keys[0])
    assert index.hits((1, 2, 9)) == {keys[1]: 2}
