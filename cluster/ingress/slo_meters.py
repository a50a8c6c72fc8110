"""Attainment of SLOs, counted for one class."""

from pengserve.cluster.ingress.kept import Outcome
from pengserve.cluster.metrics import catalog
from pengserve.cluster.metrics.facade import Counter, Metrics

_OUTCOMES = {True: "kept", False: "missed"}


class SloMeters:
    """The counters of one class, bound once."""

    def __init__(self, metrics: Metrics, service_class: str) -> None:
        def requests(latency: str) -> dict[bool, Counter]:
            return {
                is_kept: metrics.counter(
                    catalog.SLO_REQUESTS, service_class=service_class, latency=latency, outcome=outcome
                )
                for is_kept, outcome in _OUTCOMES.items()
            }

        self._ttft, self._tpot, self._tbt = requests("ttft"), requests("tpot"), requests("tbt")
        self._tokens = {
            is_kept: metrics.counter(catalog.SLO_TOKENS, service_class=service_class, outcome=outcome)
            for is_kept, outcome in _OUTCOMES.items()
        }

    def ended(self, outcome: Outcome) -> None:
        """A sequence ended with this."""
        for counters, is_kept in (
            (self._ttft, outcome.is_ttft_kept),
            (self._tpot, outcome.is_tpot_kept),
            (self._tbt, outcome.is_tbt_kept),
        ):
            if is_kept is not None:
                counters[is_kept].inc()
        if outcome.is_tbt_kept is not None and outcome.num_gaps:
            self._tokens[True].inc(outcome.num_gaps - outcome.num_late_gaps)
            self._tokens[False].inc(outcome.num_late_gaps)
