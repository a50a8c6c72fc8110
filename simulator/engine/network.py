"""What instances send each other, over the links of their cluster."""

from collections.abc import Sequence

from pengserve.simulator.engine.instance import SimInstance
from pengserve.simulator.hardware.catalog import Gpu
from pengserve.simulator.timing.links import ClusterLinks, Kind, Latencies


class LinkNetwork:
    """`switches.switch.Network` over `ClusterLinks`, whose ends are slots. Belongs to the loop that it is made in."""

    def __init__(self, gpu: Gpu, num_instances: int, per_node: int, latencies: Latencies) -> None:
        """`gpu` has the links of one instance."""
        self._links = ClusterLinks(gpu, [slot // per_node for slot in range(num_instances)], latencies)

    async def send(self, source: SimInstance, target: SimInstance, num_bytes: int, *, is_weights: bool) -> None:
        """Returns when the bytes have come over the links; KV goes before weights."""
        kind = Kind.WEIGHTS if is_weights else Kind.KV
        await self._links.transfer(source.instance_id, target.instance_id, num_bytes, kind)

    def hop_s(self, members: Sequence[SimInstance], num_bytes: int) -> float:
        """Seconds in which activations go from one of `members` to the next, over the slowest of these links.

        They go first, so that nothing else makes them slower.
        """
        ids = [member.instance_id for member in members]
        return max(self._links.alone_s(a, b, num_bytes) for a, b in zip(ids, (*ids[1:], ids[0]), strict=True))
