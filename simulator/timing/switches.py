"""What switches and starts cost beside the bytes that links move: figures of `simulator/hardware/costs.yaml`."""

from dataclasses import dataclass
from typing import Any

from pengserve.simulator.hardware.catalog import Gpu, ModelSpec
from pengserve.simulator.timing.choose import costs
from pengserve.simulator.timing.links import Latencies


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCosts:
    """Seconds, of one kind of device."""

    call_s: float  # one map or unmap of memory
    chunk_bytes: int | None  # that one call moves; None: a layer's range at a time
    cutover_s: float  # nothing steps for so long, beside moving KV and waiting for the slowest member's step
    start_fixed_s: float
    start_bytes_per_s: float  # weights from the node's disk, for all instances that start there together

    def remap_s(self, num_bytes: int, num_layers: int) -> float:
        """Turning `num_bytes` of weights of `num_layers` layers into KV, or back (KunServe section 4.1)."""
        if num_bytes <= 0:
            return 0.0
        calls = num_layers if self.chunk_bytes is None else max(num_layers, -(-num_bytes // self.chunk_bytes))
        return calls * self.call_s

    def start_s(self, model: ModelSpec, num_together: int = 1) -> float:
        """From asking for an instance to its first request, where so many of a node start at the same time."""
        return self.start_fixed_s + num_together * model.weight_bytes / self.start_bytes_per_s


def switch_costs(gpu: Gpu) -> SwitchCosts:
    """Those of this device."""
    device = "cpu" if gpu.name == "cpu" else "cuda"
    remap, start = costs()["remap"][device], costs()["start"][device]
    return SwitchCosts(
        call_s=float(remap["call_s"]),
        chunk_bytes=remap.get("chunk_bytes"),
        cutover_s=float(costs()["cutover"][device]["seconds"]),
        start_fixed_s=float(start["fixed_s"]),
        start_bytes_per_s=float(start["bytes_per_s"]),
    )


def latencies() -> Latencies:
    """Of links, as far as they are known."""
    row: dict[str, Any] = costs()["links"]
    return Latencies(
        nvlink_s=float(row["nvlink_latency_s"]),
        nic_s=float(row["nic_latency_s"]),
        pcie_s=float(row["pcie_latency_s"]),
        chunk_bytes=int(row["chunk_bytes"]),
    )
