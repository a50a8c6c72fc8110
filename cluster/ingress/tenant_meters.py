"""Metrics of tenants and classes, with labels that are bounded: those that come first, and `*` for all others."""

from collections import Counter
from collections.abc import Callable, Iterable

from pengserve.cluster.ingress.record import RequestRecord
from pengserve.cluster.ingress.tenant_figures import OTHERS, computed_tokens
from pengserve.cluster.metrics import catalog
from pengserve.cluster.metrics.facade import Counter as Counting
from pengserve.cluster.metrics.facade import Metrics

MAX_LABELS = 32  # pairs of a tenant and a class with series of their own
NO_TENANT = "none"

_Pair = tuple[str, str]


class TenantMeters:
    """Belongs to the event loop. Series of a pair stay as long as the ingress runs."""

    def __init__(self, metrics: Metrics, records: Callable[[], Iterable[RequestRecord]]) -> None:
        """`records` gives the requests in flight; it is called when metrics are read."""
        self._metrics, self._records = metrics, records
        self._tokens: dict[_Pair, Counting] = {}
        metrics.on_refresh(self._refresh)

    def ended(self, record: RequestRecord) -> None:
        """A request is over."""
        tokens, pair = computed_tokens(record), self._pair(record)
        if tokens:
            self._tokens[pair].inc(tokens)

    def _pair(self, record: RequestRecord) -> _Pair:
        contract = record.options.contract
        pair = contract.tenant or NO_TENANT, contract.service_class
        if pair not in self._tokens:
            if len(self._tokens) >= MAX_LABELS:
                pair = OTHERS, OTHERS
            if pair not in self._tokens:
                self._tokens[pair] = self._metrics.counter(catalog.TENANT_TOKENS, tenant=pair[0], service_class=pair[1])
        return pair

    def _refresh(self) -> None:
        counts: Counter[tuple[_Pair, str]] = Counter()
        for record in self._records():
            counts[self._pair(record), "waiting" if record.first_token_s is None else "running"] += 1
        for tenant, service_class in self._tokens:
            for state in ("waiting", "running"):
                gauge = self._metrics.gauge(
                    catalog.TENANT_REQUESTS, tenant=tenant, service_class=service_class, state=state
                )
                gauge.set(counts[(tenant, service_class), state])
