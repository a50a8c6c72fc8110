"""Laws of shares: each cell of the target's comes once, from a member that has it; and tiles go where they belong."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pengserve.replicas.engine.lanes.kv_shares import KvShare, LaneKv, flows_between, shares_of
from pengserve.replicas.memory.kv_views import BlockLayout, KvView

SHAPES = ("dp", "tp2", "tp4", "tp8", "pp2", "pp3", "pp4")
Cell = tuple[int, int]


def cells(share: KvShare) -> set[Cell]:
    """By brute force: (layer, head)."""
    return set(itertools.product(range(*share.layers), range(*share.heads)))


@pytest.mark.parametrize(("source", "target"), list(itertools.product(SHAPES, SHAPES)))
@pytest.mark.parametrize(("num_layers", "num_heads"), [(4, 8), (7, 4), (9, 2)])
def test_each_member_gets_all_of_its_share_once(source: str, target: str, num_layers: int, num_heads: int) -> None:
    sources, targets = shares_of(source, num_layers, num_heads), shares_of(target, num_layers, num_heads)
    flows = flows_between(sources, targets)
    for rank, share in enumerate(targets):
        coming = [cell for flow in flows if flow.target == rank for cell in cells(flow.share)]
        assert len(coming) == len(set(coming)) and set(coming) == cells(share)
    assert all(cells(flow.share) <= cells(sources[flow.source]) for flow in flows)
    assert len({(flow.source, flow.target) for flow in flows}) == len(flows), "one rectangle between two members"


def test_members_with_the_same_heads_take_turns() -> None:
    flows = flows_between(shares_of("tp4", 2, 1), shares_of("tp4", 2, 1))
    assert {flow.source for flow in flows} == {0, 1, 2, 3}


TILE, LAYERS, HEADS, BLOCKS = 4, 3, 4, 6


def a_view(num_heads: int, num_tokens: int) -> KvView:
    elements = 2 * num_heads * num_tokens
    place = torch.arange(elements).view(2, num_heads, num_tokens, 1).transpose(1, 2)
    return KvView([torch.zeros(BLOCKS, elements) for _ in range(LAYERS)], BlockLayout(place))


def content(layer: int, head: int, tile: int) -> float:
    return float(1 + layer + 10 * head + 100 * tile)


@given(st.integers(0, 5), st.integers(1, 6), st.permutations(range(1, BLOCKS)))
def test_tiles_of_one_shape_are_read_and_written_in_another(first: int, count: int, physical: list[int]) -> None:
    """From `dp` to rank 1 of tp2, whose blocks have two tiles."""
    stop = min(first + count, BLOCKS - 1)
    if stop <= first:
        return
    whole, half = KvShare((0, LAYERS), (0, HEADS)), KvShare((0, LAYERS), (2, 4))
    dp, tp = a_view(HEADS, TILE), a_view(HEADS // 2, 2 * TILE)
    for tile in range(BLOCKS - 1):
        found = dp.tiles([([physical[tile]], TILE)], TILE)
        data = torch.empty(dp.shape(HEADS, 1, TILE))
        for layer, head in itertools.product(range(LAYERS), range(HEADS)):
            data[layer, :, 0, head] = content(layer, head, tile)
        dp.write(found, data, (0, HEADS))
    source = LaneKv(dp, whole, TILE, lambda ids: [physical[i] for i in ids])
    target = LaneKv(tp, half, TILE, lambda ids: [1 + i for i in ids])
    out = source.rows(list(range(first, stop)), first, stop - first, half)
    into = target.rows(list(range(first // 2, -(-stop // 2))), first, stop - first, half)
    assert out.num_rows == into.num_rows == stop - first and out.row_bytes == into.row_bytes
    for row in range(out.num_rows):  # they may come one by one
        into.write(row, out.read(row, row + 1).view(-1).view(torch.uint8))
    for tile in range(first, stop):
        place = tp.tiles([([1 + tile // 2], 2 * TILE)], TILE).part(tile % 2, tile % 2 + 1)
        there = tp.read(place, (0, 2))
        for layer, head in itertools.product(range(LAYERS), (2, 3)):
            assert (there[layer, :, 0, head - 2] == content(layer, head, tile)).all()
    written = sum(int((layer != 0).sum()) for layer in tp._layers)
    assert written == LAYERS * 2 * 2 * TILE * (stop - first), "other tiles are left alone"
