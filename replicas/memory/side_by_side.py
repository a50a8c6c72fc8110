"""KV of neighbouring layers seen as one memory, twice in a row: what `kv/pool.py` needs, over memory that moves."""

from collections.abc import Sequence

import torch

from pengserve.replicas.memory.arena.arena import Arena, Region


class SideBySide:
    """Addresses that show the KV of some layers once more. They own no memory."""

    def __init__(self, arena: Arena, layers: Sequence[Region], num_chunks: int, name: str) -> None:
        """
        Args:
            layers: the KV of each.
            num_chunks: of each that are shown, at most.

        Raises:
            StepError: the system has no such range.
        """
        self._arena, self._layers, self._num_chunks = arena, layers, num_chunks
        self._mirror = arena.mirror(2 * len(layers) * num_chunks, name)

    @property
    def memory(self) -> torch.Tensor:
        """uint8, a layer after the other, and all of it once more. Only what `show` has shown may be touched."""
        return self._mirror.tensor(torch.uint8)

    def show(self) -> None:
        """Shows the memory that is behind the layers now.

        Raises:
            StepError: the system refused.
        """
        for place in range(2 * len(self._layers)):
            layer = self._layers[place % len(self._layers)]
            self._arena.show(self._mirror, place * self._num_chunks, layer, self._num_chunks)
