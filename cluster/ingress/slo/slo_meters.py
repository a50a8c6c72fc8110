"""Attainment of SLOs, counted for one class."""

from pengserve.cluster.ingress.request.kept import Outcome
from pengserve.cluster.metrics import catalog
from pengserve.cluster.metrics.facade import Counter, Metrics
from pengserve.planners.lengths import LengthRange

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

        self._lengths = {
            (bound, is_reached): metrics.counter(
                catalog.LENGTH_PREDICTIONS, service_class=service_class, bound=bound, outcome=outcome
            )
            for bound in ("low", "median")
            for is_reached, outcome in ((True, "reached"), (False, "below"))
        }

    def length(self, expected: LengthRange, num_tokens: int) -> None:
        """An answer that was expected to have so many tokens ended by itself with `num_tokens`."""
        self._lengths["low", num_tokens >= expected.low].inc()
        self._lengths["median", num_tokens >= expected.median].inc()

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
