"""Links between the instances of a cluster, as switches ask for them: so many bytes a second, and nobody in the way."""

import asyncio
from dataclasses import dataclass

from pengserve.simulator.engine.instance import SimInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainNetwork:
    """No two transfers share a link here."""

    node_bytes_per_s: float  # between instances of one node, of one direction
    nic_bytes_per_s: float  # between nodes
    latency_s: float = 10e-6

    async def send(self, source: SimInstance, target: SimInstance, num_bytes: int, *, is_weights: bool) -> None:
        """See `switches.switch.Network`."""
        await asyncio.sleep(self.latency_s + num_bytes / self.bytes_per_s(source, target))

    def bytes_per_s(self, source: SimInstance, target: SimInstance) -> float:
        """Of one direction."""
        is_near = source.device.node_id == target.device.node_id
        return self.node_bytes_per_s if is_near else self.nic_bytes_per_s
