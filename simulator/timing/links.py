"""Links of a cluster in virtual time: what is sent takes its bytes' time, and more where ports are shared.

An instance has ports to the other GPUs of its node (NVLink, or PCIe without it), to other nodes, and to its host, each
one way. A transfer holds one port of each instance, and goes at the rate of the slower:

    activations    share their ports among themselves, as if nothing else were there
    KV, weights    share what those leave, each the same (processor sharing)

An activation that comes while others are sent waits for the chunk that is under way (KunServe section 4.2). Rates
change when a transfer begins or ends, and only of those that meet it at a port.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from pengserve.simulator.hardware.catalog import Gpu


class Kind(IntEnum):
    """What is sent; the lowest goes first."""

    ACTIVATION = 0
    KV = 1
    WEIGHTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Seconds from the first byte's departure to its arrival, and the bytes of KV and weights sent in one piece."""

    nvlink_s: float = 0.0
    nic_s: float = 0.0
    pcie_s: float = 0.0
    chunk_bytes: int = 4 << 20


@dataclass(slots=True, eq=False)
class _Port:
    """One way of one link. Transfers are in the order in which they began."""

    bytes_per_s: float
    urgent: dict["_Transfer", None] = field(default_factory=dict)
    others: dict["_Transfer", None] = field(default_factory=dict)

    def urgent_share(self) -> float:
        return self.bytes_per_s / len(self.urgent)

    def other_share(self) -> float:
        left = self.bytes_per_s - sum(transfer.rate for transfer in self.urgent)
        return max(0.0, left) / len(self.others)


@dataclass(slots=True, eq=False)
class _Transfer:
    left: float  # bytes, at `since_s`
    ports: tuple[_Port, ...]
    done: asyncio.Future[None]
    since_s: float
    rate: float = 0.0
    timer: asyncio.TimerHandle | None = None


class ClusterLinks:
    """All links of a cluster of equal GPUs. Runs in the event loop whose `time` is the cluster's."""

    def __init__(self, gpu: Gpu, nodes: Sequence[int], latencies: Latencies | None = None) -> None:
        """`nodes[i]` is the node of instance i."""
        self._nodes, self._latencies, self._gpu = tuple(nodes), latencies or Latencies(), gpu
        rates = {"peer": gpu.peer_bytes_per_s, "nic": gpu.nic_bytes_per_s, "pcie": gpu.pcie_bytes_per_s}
        self._ports = [
            {(link, way): _Port(rate) for link, rate in rates.items() for way in ("out", "in")} for _ in self._nodes
        ]
        if not gpu.nvlink_bytes_per_s:  # peers and the host are reached over the same lanes
            for ports in self._ports:
                ports["peer", "out"], ports["peer", "in"] = ports["pcie", "out"], ports["pcie", "in"]
        self._sent_bytes = dict.fromkeys(Kind, 0)

    @property
    def sent_bytes(self) -> dict[Kind, int]:
        """What has arrived, by kind."""
        return dict(self._sent_bytes)

    def alone_s(self, src: int | None, dst: int | None, num_bytes: int) -> float:
        """Seconds of a transfer that meets no other. None is the host of the other end."""
        if src == dst:
            return 0.0
        ports, latency_s = self._way(src, dst)
        return latency_s + num_bytes / min(port.bytes_per_s for port in ports)

    async def transfer(self, src: int | None, dst: int | None, num_bytes: int, kind: Kind) -> None:
        """Returns when all has arrived. None is the host of the other end. A cancelled transfer leaves its ports."""
        if src == dst:
            return
        ports, latency_s = self._way(src, dst)
        wait_s = latency_s + (self._chunk_s(ports) if kind is Kind.ACTIVATION else 0.0)
        if wait_s:
            await asyncio.sleep(wait_s)
        if num_bytes > 0:
            await self._send(kind, num_bytes, ports)
        self._sent_bytes[kind] += num_bytes

    async def _send(self, kind: Kind, num_bytes: int, ports: tuple[_Port, ...]) -> None:
        loop = asyncio.get_running_loop()
        transfer = _Transfer(num_bytes, ports, loop.create_future(), loop.time())
        for port in ports:
            _class(port, kind)[transfer] = None
        self._share(ports, kind)
        try:
            await transfer.done
        finally:
            if transfer.timer is not None:
                transfer.timer.cancel()
            for port in ports:
                _class(port, kind).pop(transfer, None)
            self._share(ports, kind)

    def _way(self, src: int | None, dst: int | None) -> tuple[tuple[_Port, ...], float]:
        """The ports that a transfer holds, and its latency. The host is no bottleneck."""
        latencies = self._latencies
        if src is None or dst is None:
            return (*self._at(src, "pcie", "out"), *self._at(dst, "pcie", "in")), latencies.pcie_s
        if self._nodes[src] != self._nodes[dst]:
            return (*self._at(src, "nic", "out"), *self._at(dst, "nic", "in")), latencies.nic_s
        latency_s = latencies.nvlink_s if self._gpu.nvlink_bytes_per_s else latencies.pcie_s
        return (*self._at(src, "peer", "out"), *self._at(dst, "peer", "in")), latency_s

    def _at(self, instance: int | None, link: str, way: str) -> list[_Port]:
        return [] if instance is None else [self._ports[instance][link, way]]

    def _chunk_s(self, ports: Iterable[_Port]) -> float:
        """Until the chunks under way at these ports are through, at the rates of now."""
        now_s, chunk = asyncio.get_running_loop().time(), self._latencies.chunk_bytes
        longest_s = 0.0
        for port in ports:
            for transfer in port.others:
                if transfer.rate > 0:
                    left = transfer.left - transfer.rate * (now_s - transfer.since_s)
                    longest_s = max(longest_s, (left % chunk) / min(p.bytes_per_s for p in transfer.ports))
        return longest_s

    def _share(self, ports: Iterable[_Port], kind: Kind) -> None:
        """Sets the rates of all that a begin or an end at these ports changes."""
        now_s = asyncio.get_running_loop().time()
        if kind is Kind.ACTIVATION:
            urgent = dict.fromkeys(transfer for port in ports for transfer in port.urgent)
            for transfer in urgent:
                _set_rate(transfer, min(port.urgent_share() for port in transfer.ports), now_s)
            ports = dict.fromkeys([*ports, *(port for transfer in urgent for port in transfer.ports)])
        for transfer in dict.fromkeys(transfer for port in ports for transfer in port.others):
            _set_rate(transfer, min(port.other_share() for port in transfer.ports), now_s)


def _class(port: _Port, kind: Kind) -> dict[_Transfer, None]:
    return port.urgent if kind is Kind.ACTIVATION else port.others


def _set_rate(transfer: _Transfer, rate: float, now_s: float) -> None:
    """Takes off what was sent at the old rate, and sets the timer for the new one."""
    if rate == transfer.rate or transfer.done.done():
        return
    transfer.left -= transfer.rate * (now_s - transfer.since_s)
    transfer.since_s, transfer.rate = now_s, rate
    if transfer.timer is not None:
        transfer.timer.cancel()
    loop = transfer.done.get_loop()
    transfer.timer = loop.call_at(now_s + max(0.0, transfer.left) / rate, _finish, transfer) if rate > 0 else None


def _finish(transfer: _Transfer) -> None:
    if not transfer.done.done():
        transfer.left = 0.0
        transfer.done.set_result(None)
