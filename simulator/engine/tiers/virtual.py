"""A device and a host without memory: the tables, ledgers and rules of `replicas.kv` over a virtual link."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pengserve.replicas.kv.host_tier import HostTier
from pengserve.replicas.kv.placement import Placement
from pengserve.replicas.kv.pool import DevicePool
from pengserve.replicas.kv.room import Room, TierCounts
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.kv.traffic import Traffic
from pengserve.replicas.memory.arena.free_chunks import FreeChunks
from pengserve.simulator.engine.tiers.link import VirtualLink


class VirtualPool(DevicePool):
    """Cells without bytes."""

    def __init__(self, num_layers: int, num_blocks: int, block_bytes: int) -> None:
        self.num_layers, self.num_blocks, self.block_bytes = num_layers, num_blocks, block_bytes
        self.num_cells = num_layers * num_blocks
        self._bases = (np.arange(num_layers, dtype=np.int64) * num_blocks)[:, None]


class VirtualHost(HostTier):
    """Rows without bytes."""

    def __init__(self, num_rows: int, block_bytes: int) -> None:
        self.num_rows, self.block_bytes = num_rows, block_bytes
        self._free = FreeChunks(num_rows)


class VirtualTiers(TieredKv):
    """`TieredKv` with a link in virtual time; all else is production's."""

    def __init__(
        self,
        *,
        num_layers: int,
        device_blocks: int,
        host_blocks: int,
        num_blocks: int,
        block_size: int,
        block_bytes: int,
        bytes_per_s: float,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            device_blocks: in each layer, the null block included.
            num_blocks: logical ones, the null block included.
            block_bytes: of one block in one layer.
        """
        self.pool, self.host = (
            VirtualPool(num_layers, device_blocks, block_bytes),
            VirtualHost(host_blocks, block_bytes),
        )
        self.block_size = block_size
        self.link = VirtualLink(block_bytes, bytes_per_s, clock)
        engine: Any = self.link
        self.engine = engine
        self.placement = Placement(self.pool, self.host, num_blocks)
        self.traffic = Traffic(engine, self.pool, self.host, num_blocks)
        self.counts = TierCounts()
        self.step = 0
        self.room = Room(self.pool, self.placement, self.traffic, self.counts)
        self._current = None

    def stage_all(self) -> tuple[list[int], int]:
        """Takes what the present step stages off the link; cells by layer, and the cells that they take turns in.

        Nothing where no layer waits.
        """
        step = self._current
        if step is None or not step.waits:
            return [], 0
        staged = [0] * self.pool.num_layers
        for layer, copy in step.waits.items():
            staged[layer] = len(copy.cells)
            copy.is_ready = _always
        self.link.take_staged(step.waits.values())
        return staged, len(step.ring)


def _always() -> bool:
    return True
