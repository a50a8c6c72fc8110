"""How much KV changes member on a switch: all but what is where it belongs already."""

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.stages import Parts
from pengserve.simulator.engine.group import SimTraveller
from pengserve.simulator.engine.switches.switch import by_head, by_layer

TOKEN_BYTES = 1 << 17
SIZES = (2, 4, 8)


def travellers(size: int, tokens: list[int]) -> list[SimTraveller]:
    """Requests of so many tokens, dealt out to the members."""
    return [SimTraveller(cast(Any, None), index % size, count) for index, count in enumerate(tokens)]


def alone(size: int) -> Parts:
    return Parts(size, (1,) * size)


TOKENS = st.lists(st.integers(1, 9_999), max_size=12)


@given(TOKENS, st.sampled_from(SIZES))
def test_by_head_all_but_each_members_own_share_moves(tokens: list[int], size: int) -> None:
    moved = sum(by_head(travellers(size, tokens), alone(size), TOKEN_BYTES, is_merge=True).values())
    assert moved == sum(tokens) * TOKEN_BYTES * (size - 1) // size


@given(st.lists(st.integers(1, 9_999), max_size=12), st.sampled_from([(2, 2), (2, 1, 1), (1, 1, 2), (4, 4)]))
def test_by_head_members_of_a_narrower_group_keep_what_they_go_on_with(
    tokens: list[int], sizes: tuple[int, ...]
) -> None:
    """A member of s has 1/s of a request of its group, and keeps 1/p of it; all others get 1/p each."""
    parts, size = Parts(8, sizes), sum(sizes)
    leaders = [parts.start(part) for part in range(len(sizes))]
    found = [SimTraveller(cast(Any, None), leaders[i % len(leaders)], count) for i, count in enumerate(tokens)]
    pairs = by_head(found, parts, TOKEN_BYTES, is_merge=True)
    for source, target in pairs:
        first = parts.start(parts.of(source))
        own = source - first
        low, stop = own / parts.sizes[parts.of(source)], (own + 1) / parts.sizes[parts.of(source)]
        assert low <= target / size < stop, "it has these heads"
    for traveller in found:
        mine = by_head([traveller], parts, TOKEN_BYTES, is_merge=True)
        targets = [target for _, target in mine]
        assert len(targets) == len(set(targets)), "each head comes once"
        assert set(mine.values()) <= {traveller.num_tokens * TOKEN_BYTES // size}


@given(TOKENS, st.sampled_from(SIZES))
def test_by_layer_all_but_the_layers_that_stay_move(tokens: list[int], size: int) -> None:
    moved = sum(by_layer(travellers(size, tokens), Parts(4 * size, (1,) * size), TOKEN_BYTES, is_drop=True).values())
    assert moved == sum(tokens) * TOKEN_BYTES * (size - 1) // size


@given(TOKENS)
def test_what_a_merge_sends_comes_back_on_a_split(tokens: list[int]) -> None:
    there = by_head(travellers(4, tokens), alone(4), TOKEN_BYTES, is_merge=True)
    back = by_head(travellers(4, tokens), alone(4), TOKEN_BYTES, is_merge=False)
    assert {(b, a): num_bytes for (a, b), num_bytes in there.items()} == back


@given(TOKENS)
def test_what_a_drop_sends_comes_back_on_a_restore(tokens: list[int]) -> None:
    there = by_layer(travellers(2, tokens), Parts(9, (1, 1)), TOKEN_BYTES, is_drop=True)
    back = by_layer(travellers(2, tokens), Parts(9, (1, 1)), TOKEN_BYTES, is_drop=False)
    assert {(b, a): num_bytes for (a, b), num_bytes in there.items()} == back


@given(st.lists(st.integers(1, 9_999), max_size=12))
def test_of_two_pipelines_that_become_one_half_of_all_kv_moves(tokens: list[int]) -> None:
    """Each member keeps half of its layers, and the requests of its part have that half there."""
    parts = Parts(8, (2, 2))
    found = [SimTraveller(cast(Any, None), 2 * (index % 2), count) for index, count in enumerate(tokens)]
    pairs = by_layer(found, parts, TOKEN_BYTES, is_drop=True)
    assert sum(pairs.values()) == sum(tokens) * TOKEN_BYTES // 2
    assert all(parts.of(source) != parts.of(target) for source, target in pairs)
