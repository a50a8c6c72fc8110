"""Metrics of tenants and classes, with labels that are bounded: those that come first, and `*` for all others."""

from collections import Counter
from collections.abc import Callable, Iterable

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.cluster.ingress.tenants.tenant_figures import OTHERS, computed_tokens
from pengserve.cluster.metrics import catalog
from pengserve.cluster.metrics.facade import Metrics

MAX_LABELS = 32  # pairs of a tenant and a class with series of their own
NO_TENANT = "none"

_Pair = tuple[str, str]


class _Series:
    """The counters of one pair, bound once."""

    def __init__(self, metrics: Metrics, tenant: str, service_class: str) -> None:
        names = {"tenant": tenant, "service_class": service_class}
        self._tokens = metrics.counter(catalog.TENANT_TOKENS, **names)
        self._parked, self._recomputed = (
            metrics.counter(catalog.TENANT_PREEMPTIONS, **names, kind=kind) for kind in ("parked", "recomputed")
        )
        self._swapped_bytes = metrics.counter(catalog.TENANT_SWAPPED_BYTES, **names)
        self._kept, self._missed = (
            metrics.counter(catalog.TENANT_SLO_REQUESTS, **names, outcome=outcome) for outcome in ("kept", "missed")
        )

    def ended(self, record: RequestRecord) -> None:
        """A request of the pair is over."""
        counts = (
            (self._tokens, computed_tokens(record)),
            (self._parked, record.num_parks),
            (self._recomputed, record.num_recomputes),
            (self._swapped_bytes, record.swapped_bytes),
        )
        for counter, count in counts:
            if count:
                counter.inc(count)
        if record.kept is not None and record.kept.is_counted:
            (self._kept if record.kept.outcome().is_kept else self._missed).inc()


class TenantMeters:
    """Belongs to the event loop. Series of a pair stay as long as the ingress runs."""

    def __init__(self, metrics: Metrics, records: Callable[[], Iterable[RequestRecord]]) -> None:
        """`records` gives the requests in flight; it is called when metrics are read."""
        self._metrics, self._records = metrics, records
        self._series: dict[_Pair, _Series] = {}
        metrics.on_refresh(self._refresh)

    def ended(self, record: RequestRecord) -> None:
        """A request is over."""
        self._series[self._pair(record)].ended(record)

    def _pair(self, record: RequestRecord) -> _Pair:
        contract = record.options.contract
        pair = contract.tenant or NO_TENANT, contract.service_class
        if pair not in self._series:
            if len(self._series) >= MAX_LABELS:
                pair = OTHERS, OTHERS
            if pair not in self._series:
                self._series[pair] = _Series(self._metrics, *pair)
        return pair

    def _refresh(self) -> None:
        counts: Counter[tuple[_Pair, str]] = Counter()
        for record in self._records():
            counts[self._pair(record), "waiting" if record.first_token_s is None else "running"] += 1
        for tenant, service_class in self._series:
            for state in ("waiting", "running"):
                gauge = self._metrics.gauge(
                    catalog.TENANT_REQUESTS, tenant=tenant, service_class=service_class, state=state
                )
                gauge.set(counts[(tenant, service_class), state])
