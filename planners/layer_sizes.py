"""How many blocks of KV fit beside the weights of a model's layers (KunServe section 4.1). Pure arithmetic.

Layers are `[0, L)`. A stage has the weights of some of them alone, and blocks of these layers in what the others leave.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pengserve.planners.stages import Parts

LayerRange = tuple[int, int]
"""Half-open range of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """What there is to hold, and in what units."""

    num_chunks: int  # for weights and KV together
    chunk_bytes: int  # unit in which memory moves between weights and KV
    weight_bytes: tuple[int, ...]  # by layer
    block_bytes: int  # of one block in one layer

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.weight_bytes)

    @property
    def all_layers(self) -> LayerRange:
        """What a `dp` lane has."""
        return (0, self.num_layers)

    def weight_chunks(self, layer: int) -> int:
        """Chunks that back the weights of `layer`."""
        return -(-self.weight_bytes[layer] // self.chunk_bytes)

    def kv_chunks(self, num_blocks: int) -> int:
        """Chunks that back `num_blocks` of one layer."""
        return -(-num_blocks * self.block_bytes // self.chunk_bytes)

    def num_blocks(self, layers: LayerRange) -> int:
        """Blocks that fit beside the weights of `layers`, where there are no others."""
        return self.num_blocks_beside(layers, layers)

    def num_blocks_beside(self, weights: LayerRange, layers: LayerRange) -> int:
        """Blocks of `layers` that fit beside the weights of more layers."""
        first, stop = layers
        left = self.num_chunks - sum(map(self.weight_chunks, range(*weights)))
        return max(0, left // (stop - first)) * self.chunk_bytes // self.block_bytes

    def num_pipeline_blocks(self, stages: Iterable[LayerRange]) -> int:
        """Blocks that all of these stages hold, without vLLM's null block: what their scheduler may hand out."""
        return min(map(self.num_blocks, stages)) - 1

    def num_blocks_left(self, parts: Parts) -> int:
        """Blocks that a pipeline keeps while the weights come back that its members have in `parts`."""
        ranks = range(sum(parts.sizes))
        return min(self.num_blocks_beside(parts.layers(rank), parts.wide_layers(rank)) for rank in ranks)
