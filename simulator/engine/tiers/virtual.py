"""A device and a host without memory: the tables, ledgers and rules of `replicas.kv` over a virtual link."""

from collections.abc import Callable
from typing import Any

import numpy as np

from pengserve.replicas.kv.host_tier import HostRows
from pengserve.replicas.kv.pool import DevicePool
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.simulator.engine.tiers.link import VirtualLink


class VirtualPool(DevicePool):
    """Cells without bytes."""

    def __init__(self, num_layers: int, num_blocks: int, block_bytes: int) -> None:
        self.num_layers, self.num_blocks, self.block_bytes = num_layers, num_blocks, block_bytes
        self.num_cells = num_layers * num_blocks
        self._bases = (np.arange(num_layers, dtype=np.int64) * num_blocks)[:, None]


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
        pool = VirtualPool(num_layers, device_blocks, block_bytes)
        host: Any = HostRows(host_blocks, block_bytes)
        self.link = VirtualLink(block_bytes, bytes_per_s, clock)
        engine: Any = self.link
        super().__init__(pool, host, num_blocks=num_blocks, block_size=block_size, engine=engine)

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
            copy.is_ready = True
        self.link.take_staged(step.waits.values())
        return staged, len(step.ring)
