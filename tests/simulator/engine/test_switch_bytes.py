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


TOKENS = st.lists(st.integers(1, 9_999), max_size=12)


@given(TOKENS, st.sampled_from(SIZES))
def test_by_head_all_but_each_members_own_share_moves(tokens: list[int], size: int) -> None:
    moved = sum(by_head(travellers(size, tokens), size, TOKEN_BYTES, is_merge=True).values())
    assert moved == sum(tokens) * TOKEN_BYTES * (size - 1) // size


@given(TOKENS, st.sampled_from(SIZES))
def test_by_layer_all_but_the_layers_that_stay_move(tokens: list[int], size: int) -> None:
    moved = sum(by_layer(travellers(size, tokens), Parts(4 * size, (1,) * size), TOKEN_BYTES, is_drop=True).values())
    assert moved == sum(tokens) * TOKEN_BYTES * (size - 1) // size


@given(TOKENS)
def test_what_a_merge_sends_comes_back_on_a_split(tokens: list[int]) -> None:
    there = by_head(travellers(4, tokens), 4, TOKEN_BYTES, is_merge=True)
    back = by_head(travellers(4, tokens), 4, TOKEN_BYTES, is_merge=False)
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
