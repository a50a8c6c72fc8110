"""Weights and KV of a model's layers over one arena, and how many blocks that makes (KunServe section 4.1).

Layers are `[0, L)`. Of each, the weights are one address range and the KV is another; neither ever moves. What backs
them does:

    dp              weights of all layers      KV of blocks [0, B) in every layer
    stage [a, b)    weights of [a, b) alone    KV of blocks [0, G) in layers [a, b), and none in others; G > B

Blocks of a stage are the cheaper the fewer layers it has: what the other layers had backs the tails of its own. Both
counts include vLLM's null block 0.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from pengserve.planners.layer_sizes import LayerRange, LayerSizes
from pengserve.planners.types.errors import ConfigError, UnsupportedShapeError
from pengserve.planners.types.units import format_bytes
from pengserve.replicas.memory.arena.arena import Arena
from pengserve.replicas.memory.side_by_side import SideBySide


class LayerMemory:
    """Which layers are here, and how much KV of each. Mechanism alone: it knows no request and no peer."""

    def __init__(self, arena: Arena, sizes: LayerSizes, fewest_layers: int, *, is_gradual: bool = False) -> None:
        """Reserves all ranges and maps what `dp` has.

        Args:
            fewest_layers: of any stage; KV ranges are as long as that one needs.
            is_gradual: the arena grows to the size in `sizes` as layers come: `grow_for`, and at last `fill_up`.

        Raises:
            ConfigError: `sizes` do not hold the weights and two blocks.
        """
        self.sizes, self._arena = sizes, arena
        self.base_blocks = sizes.num_blocks(sizes.all_layers)
        if self.base_blocks < 2:
            weights = sum(sizes.weight_chunks(layer) for layer in range(sizes.num_layers)) * sizes.chunk_bytes
            raise ConfigError(
                f"{format_bytes(sizes.num_chunks * sizes.chunk_bytes)} do not hold {format_bytes(weights)} of weights"
                " and KV beside them; raise memory_bytes"
            )
        self.max_blocks = max(
            sizes.num_blocks((first, first + fewest_layers)) for first in range(sizes.num_layers - fewest_layers + 1)
        )
        layers = range(sizes.num_layers)
        self._weights = [arena.reserve(sizes.weight_bytes[i], f"weights {i}") for i in layers]
        kv_bytes = self.max_blocks * sizes.block_bytes
        self._kv = [arena.reserve(kv_bytes, f"kv {i}") for i in layers]
        self.before_shrink: Callable[[int, int], None] = lambda layer, num_blocks: None  # may refuse; see `resize_kv`
        self._blocks = [0] * sizes.num_layers
        self._mirror: SideBySide | None = None  # of `dp`
        self._seen: dict[tuple[LayerRange, int], SideBySide] = {}
        if not is_gradual:
            self.fill_up()

    def grow_for(self, layer: int) -> None:
        """Takes memory of the device for the weights of `layer`, and makes room for them.

        Raises:
            ConfigError: the device does not have it.
        """
        self._arena.grow(max(0, self.sizes.weight_chunks(layer) - self._arena.num_free))
        self.bring_weights(layer)

    def fill_up(self) -> None:
        """Takes what is missing of the device's memory, and maps what `dp` has.

        Raises:
            ConfigError: the device does not have it.
        """
        self._arena.grow(max(0, self.sizes.num_chunks - self._arena.num_chunks))
        for layer in range(self.sizes.num_layers):
            self.bring_weights(layer)
            self.resize_kv(layer, self.base_blocks)

    # Addresses --------------------------------------------------------------------------------------------------------

    def weights(self, layer: int) -> torch.Tensor:
        """Bytes of the weights of `layer`: uint8 `[weight_bytes]`. Only to be touched while they are here."""
        return self._weights[layer].tensor(torch.uint8)[: self.sizes.weight_bytes[layer]]

    def kv(self, layer: int) -> torch.Tensor:
        """KV of `layer`, `[max_blocks, block_bytes]` uint8. Only blocks that are here may be touched."""
        flat = self._kv[layer].tensor(torch.uint8)[: self.max_blocks * self.sizes.block_bytes]
        return flat.view(self.max_blocks, self.sizes.block_bytes)

    def read_kv(self, layer: int, block_ids: Sequence[int] | np.ndarray) -> torch.Tensor:
        """A copy of the KV of these blocks: uint8 `[n, block_bytes]`."""
        kv = self.kv(layer)
        return kv.index_select(0, torch.tensor(block_ids, dtype=torch.int64, device=kv.device))

    def write_kv(self, layer: int, block_ids: Sequence[int] | np.ndarray, data: torch.Tensor) -> None:
        """Writes `data`, uint8 `[n, block_bytes]` on any device, as the KV of these blocks."""
        kv = self.kv(layer)
        ids = torch.tensor(block_ids, dtype=torch.int64, device=kv.device)
        _in_words(kv).index_copy_(0, ids, _in_words(data.to(kv.device)))

    def copy_kv(self, layer: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """KV of `sources` also becomes that of `targets`, which may be sources too."""
        self.write_kv(layer, targets, self.read_kv(layer, sources))

    # What is here -----------------------------------------------------------------------------------------------------

    def has_weights(self, layer: int) -> bool:
        """Whether the weights of `layer` are here."""
        return bool(self._weights[layer].mapped)

    def num_blocks(self, layer: int) -> int:
        """Blocks `[0, n)` of `layer` that are here."""
        return self._blocks[layer]

    def is_whole(self) -> bool:
        """Whether all is as `dp` needs it."""
        return all(
            self.has_weights(layer) and self._blocks[layer] == self.base_blocks
            for layer in range(self.sizes.num_layers)
        )

    @property
    def num_free_chunks(self) -> int:
        """Chunks behind nothing."""
        return self._arena.num_free

    def room(self, layer: int, num_blocks: int) -> bool:
        """Whether `resize_kv` would find the chunks it needs."""
        return self.sizes.kv_chunks(num_blocks) - self.sizes.kv_chunks(self._blocks[layer]) <= self._arena.num_free

    # Changes ----------------------------------------------------------------------------------------------------------

    def drop_weights(self, layer: int) -> None:
        """Frees the memory of the weights of `layer`; their bytes are gone."""
        if self.has_weights(layer):
            self._arena.unmap(self._weights[layer], 0, self.sizes.weight_chunks(layer))

    def bring_weights(self, layer: int) -> None:
        """Makes room for the weights of `layer`; the caller fills it.

        Raises:
            StepError: there is no memory for it.
        """
        if not self.has_weights(layer):
            self._arena.map(self._weights[layer], 0, self.sizes.weight_chunks(layer))

    def resize_kv(self, layer: int, num_blocks: int) -> None:
        """Makes blocks `[0, num_blocks)` of `layer` be here; the bytes of those that stay are kept.

        Raises:
            StepError: there is no memory for more.
            ValueError: a copy needs some of what would go.
        """
        if num_blocks < self._blocks[layer]:
            self.before_shrink(layer, num_blocks)
        before, after = self.sizes.kv_chunks(self._blocks[layer]), self.sizes.kv_chunks(num_blocks)
        if after > before:
            self._arena.map(self._kv[layer], before, after)
        elif after < before:
            self._arena.unmap(self._kv[layer], after, before)
        self._blocks[layer] = num_blocks

    # All layers side by side ------------------------------------------------------------------------------------------

    def side_by_side(self) -> torch.Tensor:
        """KV of `dp`, layer after layer, and all of it once more: uint8 `[2 * L * base_blocks * block_bytes]`.

        It shows the same memory as `kv`. Only to be touched while everything `is_whole`, after `mirror`.

        Raises:
            UnsupportedShapeError: between two layers there would be bytes of no block.
        """
        self._mirror = self.seen_side_by_side(self.sizes.all_layers, self.base_blocks)
        self.mirror()
        return self._mirror.memory

    def mirror(self) -> None:
        """Makes `side_by_side` show the memory of the layers as it is now. Everything `is_whole`.

        Raises:
            StepError: the system refused.
        """
        if self._mirror is not None:
            self._mirror.show()

    def seen_side_by_side(self, layers: LayerRange, num_blocks: int) -> SideBySide:
        """The KV of these layers, up to so many blocks of each, as `SideBySide.show` shows it.

        Raises:
            UnsupportedShapeError: between two layers there would be bytes of no block.
        """
        sizes = self.sizes
        if sizes.chunk_bytes % sizes.block_bytes:
            raise UnsupportedShapeError(f"chunks of {sizes.chunk_bytes} bytes are no whole blocks")
        if (layers, num_blocks) not in self._seen:  # addresses are never given back
            regions = [self._kv[layer] for layer in range(*layers)]
            chunks = sizes.kv_chunks(num_blocks)
            self._seen[layers, num_blocks] = SideBySide(self._arena, regions, chunks, f"KV of layers {layers}")
        return self._seen[layers, num_blocks]

    def check_chunks(self) -> tuple[str, ...]:
        """Laws that hold at any time, as sentences where one is broken: each chunk is owned once."""
        return self._arena.check()

    def check(self, layers: LayerRange, num_blocks: int) -> tuple[str, ...]:
        """Laws that are broken, as sentences: chunks are owned once, and exactly `layers` are here."""
        wrong = list(self._arena.check())
        for layer in range(self.sizes.num_layers):
            is_kept = layers[0] <= layer < layers[1]
            if self.has_weights(layer) != is_kept:
                wrong.append(f"the weights of layer {layer} are {'missing' if is_kept else 'here, and were dropped'}")
            due = num_blocks if is_kept else 0
            if self._blocks[layer] != due:
                wrong.append(f"layer {layer} has {self._blocks[layer]} blocks of KV, not {due}")
        return tuple(wrong)


def _in_words(rows: torch.Tensor) -> torch.Tensor:
    """Rows of bytes as rows of eight bytes, where they are: PyTorch scatters element by element."""
    if rows.shape[-1] % 8:
        return rows
    return (rows.clone() if rows.storage_offset() % 8 else rows).view(torch.int64)
