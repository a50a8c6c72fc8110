"""KV of a lane, tile by tile, where some of it is on the host: read from there and written there, with no detour."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.memory.kv_views import BlockLayout, KvView, Tiles

_Visit = Callable[[int, KvView, np.ndarray, Tiles], None]


class TieredKvView(KvView):
    """As a `KvView` of all blocks of both tiers. Belongs to the step thread, between steps.

    A block that is written has a place in each layer afterwards, on the device where there is room.
    """

    def __init__(
        self, device: Sequence[torch.Tensor], host: torch.Tensor, layout: BlockLayout, tiers: TieredKv
    ) -> None:
        """
        Args:
            device: per layer `[cells, elements of a block]`, as that layer's indices name the cells.
            host: the host's cells, `[cells, elements of a block]`.
        """
        super().__init__(device, layout)
        self._device, self._tiers, self._first = KvView(device, layout), tiers, 0
        self._cells, self._host = host, KvView([host], BlockLayout(layout.place.to(host.device)))

    def part(self, first: int, stop: int) -> KvView:
        """The view of layers `[first, stop)` of these alone."""
        if (first, stop) == (0, self.num_layers):
            return self
        part = TieredKvView(self._device._layers[first:stop], self._cells, self.layout, self._tiers)
        part._first = self._first + first
        return part

    def read(self, tiles: Tiles, heads: tuple[int, int]) -> torch.Tensor:
        """As `KvView.read`.

        Raises:
            EngineError: KV of a block is on neither side.
        """
        index = self._index_of(tiles.blocks.cpu().numpy())
        if _is_uniform(index):
            return self._device.read(_at(tiles, index[0], self.device), heads)
        shape = self.shape(heads[1] - heads[0], tiles.count, tiles.size)
        out = torch.empty(shape, dtype=self.dtype, device=self.device)

        def read(layer: int, view: KvView, here: np.ndarray, places: Tiles) -> None:
            out[layer][:, torch.from_numpy(here)] = view.read(places, heads)[0].to(out.device)

        self._visit(tiles, index, read)
        return out

    def write(self, tiles: Tiles, data: torch.Tensor, heads: tuple[int, int]) -> None:
        """Inverse of `read`. Other heads and tiles of the blocks stay as they are.

        Raises:
            EngineError: there is no place for a block.
        """
        blocks = tiles.blocks.cpu().numpy()
        self._tiers.claim(np.unique(blocks))
        index, placement = self._index_of(blocks), self._tiers.placement
        layers = slice(self._first, self._first + self.num_layers)
        # What is written to the device makes the copy on the host stale.
        placement.on_host[layers, blocks] &= placement.index[layers, blocks] == 0
        if _is_uniform(index):
            self._device.write(_at(tiles, index[0], self.device), data, heads)
            return

        def write(layer: int, view: KvView, here: np.ndarray, places: Tiles) -> None:
            view.write(places, data[layer : layer + 1, :, torch.from_numpy(here)].to(view.device), heads)

        self._visit(tiles, index, write)

    def _index_of(self, blocks: np.ndarray) -> np.ndarray:
        """Indices of blocks on the device, `[layers, n]`; 0: on the host."""
        found: np.ndarray = self._tiers.placement.index[self._first : self._first + self.num_layers, blocks]
        return found

    def _visit(self, tiles: Tiles, index: np.ndarray, visit: _Visit) -> None:
        """Calls `visit` for each layer and side that has some of these tiles."""
        placement, blocks = self._tiers.placement, tiles.blocks.cpu().numpy()
        for layer in range(self.num_layers):
            here, away = np.flatnonzero(index[layer]), np.flatnonzero(index[layer] == 0)
            if len(here):
                visit(layer, self._device.part(layer, layer + 1), here, _at(tiles, index[layer], self.device, here))
            if len(away):
                if not placement.on_host[self._first + layer, blocks[away]].all():
                    raise EngineError(f"KV of layer {self._first + layer} is neither on the device nor on the host")
                places = np.zeros(len(blocks), dtype=np.int64)
                places[away] = self._tiers.host.at(self._first + layer, placement.row[blocks[away]])
                visit(layer, self._host, away, _at(tiles, places, self._host.device, away))


def _is_uniform(index: np.ndarray) -> bool:
    return bool(index.size and index[0].all() and (index == index[0]).all())


def _at(tiles: Tiles, places: np.ndarray, device: torch.device, chosen: np.ndarray | None = None) -> Tiles:
    """These tiles, or the chosen ones, in the blocks that `places` says, for a view of memory on `device`."""
    parts = tiles.parts
    if chosen is not None:
        places, parts = places[chosen], parts[torch.from_numpy(chosen).to(parts.device)]
    blocks = torch.from_numpy(places.astype(np.int64))
    return replace(tiles, blocks=blocks.to(device), parts=parts.to(device))
