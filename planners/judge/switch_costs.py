"""What switches cost, as the reports of those that were carried out say: seconds in which a group's requests stall."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pengserve.planners.types.config import DropConfig
from pengserve.planners.types.snapshot import ClusterSnapshot

FIRST_CUTOVER_S = 0.1  # beside the KV that moves, before any switch has been seen
FIRST_GPU_BYTES_PER_S = 1e10  # from instance to instance, likewise
LEARN = 0.5  # weight of the newest switch
LARGE_BYTES = 32 << 20  # what moves fewer says nothing about the link


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPrices:
    """A value: a look returns the next one."""

    cutover_s: Mapping[str, float] = field(default_factory=dict)  # by verb
    bytes_per_s: float = 0.0  # 0: not measured
    seen: str = ""  # plan id of the newest switch that was learned from

    def learned(self, snapshot: ClusterSnapshot) -> "SwitchPrices":
        """With what the newest switch of `snapshot` took."""
        last = snapshot.last_switch
        if last is None or last.report is None or last.phase != "done" or last.plan_id == self.seen:
            return self
        verb, report = last.what.split(" ")[0], last.report
        fixed_s, link = self.cutover_s.get(verb, FIRST_CUTOVER_S), self.bytes_per_s
        if report.carried_bytes > LARGE_BYTES and verb != "drop":  # of a drop, KV follows after the cutover
            newest = report.carried_bytes / max(1e-3, report.cutover_s - min(fixed_s, 0.5 * report.cutover_s))
            return replace(self, seen=last.plan_id, bytes_per_s=_mixed(link, newest))
        return replace(self, seen=last.plan_id, cutover_s={**self.cutover_s, verb: _mixed(fixed_s, report.cutover_s)})

    def stall_s(self, verb: str, kv_bytes: float, num_parts: int, degree: int, link_bytes_per_s: float) -> float:
        """Seconds that the requests of a group stall: the cutover, and their KV on its way.

        Each member has 1/degree of the KV and sends what others go on with: (parts - 1)/parts of it.
        """
        link = self.bytes_per_s or link_bytes_per_s
        moved = kv_bytes * (num_parts - 1) / max(1, num_parts)
        each = 1.0 if self.bytes_per_s else 1.0 / degree  # a measured rate is of all members together
        return self.cutover_s.get(verb, FIRST_CUTOVER_S) + moved * each / link


def _mixed(before: float, newest: float) -> float:
    return newest if not before else (1.0 - LEARN) * before + LEARN * newest


def first_link(snapshot: ClusterSnapshot, config: DropConfig) -> float:
    """Bytes a second from instance to instance, before any switch has been seen."""
    is_cpu = all(i.device.device == "cpu" for i in snapshot.instances[:1])
    return config.link_bytes_per_s if is_cpu else max(config.link_bytes_per_s, FIRST_GPU_BYTES_PER_S)
