"""Which part of a request's KV each member of a group has, and who sends what to another group.

    dp       all layers, all heads
    tp p     all layers, the heads of its rank; with fewer heads than ranks, neighbours have the same one
    pp s     the layers of its stage, all heads

Two groups cut the same KV differently: what one member sends another is what both have of it, a rectangle of layers
and heads. It goes in tiles of as many tokens as a block of `dp` has (`memory/kv_views.py`), which all shapes' blocks
are made of.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from pengserve.planners.layer_sizes import LayerRange
from pengserve.planners.stages import stage_layers, stage_of
from pengserve.planners.types.layout import GroupKind, degree_of
from pengserve.replicas.kv.rows import PartRows, TileRows
from pengserve.replicas.memory.kv_views import KvView
from pengserve.replicas.memory.weight_views import Shard


class KvShare(NamedTuple):
    """Some layers and KV heads of the model, half-open ranges of each."""

    layers: LayerRange
    heads: tuple[int, int]

    def common(self, other: "KvShare") -> "KvShare | None":
        """What is in both; None where nothing is."""
        layers, heads = _overlap(self.layers, other.layers), _overlap(self.heads, other.heads)
        return KvShare(layers, heads) if layers is not None and heads is not None else None


class Flow(NamedTuple):
    """What the member `source` of one group sends the member `target` of another, by rank."""

    source: int
    target: int
    share: KvShare


@lru_cache(maxsize=64)
def shares_of(shape: str, num_layers: int, num_heads: int) -> tuple[KvShare, ...]:
    """What each member of a group of this shape has, by rank.

    Raises:
        UnsupportedShapeError: the model cannot be cut so.
    """
    degree = degree_of(shape)
    if shape.startswith(GroupKind.PP):
        stages = stage_layers(num_layers, degree)
        return tuple(KvShare(stages[stage_of(rank, degree)], (0, num_heads)) for rank in range(degree))
    return tuple(KvShare((0, num_layers), Shard(rank, degree).heads(num_heads)) for rank in range(degree))


def flows_between(sources: Sequence[KvShare], targets: Sequence[KvShare]) -> list[Flow]:
    """Gives each target all of its share, each part from one member that has it. Of a pair there is one flow at most.

    Members that have the same heads take turns.
    """
    found = []
    for target, wanted in enumerate(targets):
        for share in dict.fromkeys(sources):
            if (common := share.common(wanted)) is not None:
                having = [rank for rank, other in enumerate(sources) if other == share]
                found.append(Flow(having[target % len(having)], target, common))
    return found


class LaneKv:
    """The KV of one lane on this member, by logical block of the lane."""

    def __init__(
        self, view: KvView, share: KvShare, tile_tokens: int, physical: Callable[[Sequence[int]], Sequence[int]]
    ) -> None:
        """
        Args:
            view: of the share's layers and heads.
            tile_tokens: tokens of a tile; as many or fewer than a block has.
            physical: the blocks of the view that back logical ones.
        """
        self._view, self._share, self._physical = view, share, physical
        self.tile_tokens = tile_tokens

    def rows(self, blocks: Sequence[int], first: int, count: int, share: KvShare) -> PartRows:
        """Tiles `[first, first + count)` of a request, as far as they are of `share`, which is part of the lane's.

        `blocks` are the logical ones that hold these tiles, in order.
        """
        in_block = self._view.layout.num_tokens // self.tile_tokens
        skipped = first % in_block
        held = (skipped + count) * self.tile_tokens
        tiles = self._view.tiles([(self._physical(blocks), held)], self.tile_tokens).part(skipped, skipped + count)
        (first_layer, _), (start, stop) = self._share.layers, share.layers
        return PartRows(self._view.part(start - first_layer, stop - first_layer), tiles, self._heads(share), start)

    def bind(
        self,
        rows: TileRows,
        requests: Sequence[tuple[Sequence[int], int]],
        share: KvShare,
        wanted: Sequence[int] | None = None,
    ) -> TileRows:
        """`rows` are the tiles of these requests (logical blocks in order, number of tokens), of the heads of `share`.

        `wanted` as of `TileRows.bind`.
        """
        found = [(self._physical(blocks), num_tokens) for blocks, num_tokens in requests]
        return rows.bind(self._view, found, self._heads(share), wanted)

    def _heads(self, share: KvShare) -> tuple[int, int]:
        first, _ = self._share.heads
        return share.heads[0] - first, share.heads[1] - first


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int] | None:
    start, stop = max(one[0], other[0]), min(one[1], other[1])
    return (start, stop) if start < stop else None
