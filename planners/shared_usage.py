"""Counters of tenants over all ingresses, kept by the controller. Pure: times are what the caller says.

An ingress reports what it has charged, and each counter as it was before: so a report never lowers what others have
charged, and a controller that begins anew has the counters back with the first reports. Between two reports an ingress
knows what it has charged itself; what others have charged is at most one period and one call old.
"""

from dataclasses import dataclass

from pengserve.planners.types.tenants import MAX_TENANTS, SharedUsage, UsageReport

FRESH_S = 5.0  # an ingress that has reported nothing for so long has no active tenants
MAX_INGRESSES = 1024


@dataclass(slots=True)
class _Ingress:
    least_active: float | None
    reported_s: float


class UsageLedger:
    """Bounded: beyond `max_tenants` the one charged longest ago is forgotten."""

    def __init__(self, max_tenants: int = MAX_TENANTS) -> None:
        self._max_tenants = max_tenants
        self._counters: dict[str, float] = {}  # the one charged longest ago first
        self._ingresses: dict[str, _Ingress] = {}

    def share(self, client_id: str, report: UsageReport, now_s: float) -> SharedUsage:
        """Takes an ingress's report, and tells what all together have charged the tenants that are active there."""
        for name, (charged, before) in report.charges.items():
            counter = max(self._counters.pop(name, before), before) + charged
            self._counters[name] = counter
        while len(self._counters) > self._max_tenants:
            del self._counters[next(iter(self._counters))]
        self._ingresses.pop(client_id, None)
        self._ingresses[client_id] = _Ingress(report.least_active, now_s)
        stale = [name for name, found in self._ingresses.items() if now_s - found.reported_s > FRESH_S]
        for name in stale:
            del self._ingresses[name]
        while len(self._ingresses) > MAX_INGRESSES:
            del self._ingresses[next(iter(self._ingresses))]
        least = [
            found.least_active
            for name, found in self._ingresses.items()
            if name != client_id and found.least_active is not None
        ]
        known = {name: self._counters[name] for name in report.tenants if name in self._counters}
        return SharedUsage(counters=known, least_active=min(least, default=None))
