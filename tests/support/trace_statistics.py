"""What a trace is like, in figures."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces import checks
from pengserve.simulator.traces.kv_demand import KvDemand, StayModel, demand_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStatistics:
    """Lengths in tokens."""

    mean: float
    p99: float
    longest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStatistics:
    """Figures of one trace. None: too few requests for this figure."""

    num_requests: int
    span_s: float  # from the first arrival to the last
    rate_per_s: float | None
    gap_cv: float | None  # standard deviation of the gaps between arrivals over their mean; 1 is Poisson
    window_s: float
    peak_rate_per_s: float  # in the busiest window
    peak_over_mean: float  # that window's requests over those of a mean window
    prompt: LengthStatistics
    output: LengthStatistics
    kv: KvDemand | None = None  # None: how long requests stay was not given

    def rows(self) -> list[tuple[str, str]]:
        """Name and value, for a table."""
        rows = [
            ("requests", f"{self.num_requests:,}"),
            ("span", f"{self.span_s:,.1f} s"),
            ("mean rate", "-" if self.rate_per_s is None else f"{self.rate_per_s:.3g} /s"),
            ("CV of gaps", "-" if self.gap_cv is None else f"{self.gap_cv:.2f}"),
            (f"peak rate, {self.window_s:g} s", f"{self.peak_rate_per_s:.3g} /s"),
            (f"peak / mean rate, {self.window_s:g} s", f"{self.peak_over_mean:.2f}"),
        ]
        for name, lengths in (("prompt", self.prompt), ("output", self.output)):
            rows.append(
                (f"{name} mean / p99 / longest", f"{lengths.mean:,.0f} / {lengths.p99:,.0f} / {lengths.longest:,}")
            )
        if self.kv is not None:
            rows.append(("KV demand mean / peak", f"{self.kv.mean_tokens:,.0f} / {self.kv.peak_tokens:,.0f} tokens"))
            rows.append(("KV demand peak / mean", f"{self.kv.peak_over_mean:.2f}, at {self.kv.peak_at_s:,.1f} s"))
        return rows


def statistics_of(
    arrivals: Sequence[Arrival], window_s: float = 10.0, stay: StayModel | None = None
) -> TraceStatistics:
    """Figures of a trace with at least one request. Windows of `window_s` start at the first arrival.

    Raises:
        ConfigError: `window_s` is not above 0.
    """
    checks.above_zero(window_s=window_s)
    at_s = np.array([request.at_s for request in arrivals], dtype=float)
    since_first = at_s - at_s[0]
    span_s = float(since_first[-1])
    gaps = np.diff(at_s)
    counts = np.bincount((since_first // window_s).astype(np.int64))
    return TraceStatistics(
        num_requests=len(arrivals),
        span_s=span_s,
        rate_per_s=len(arrivals) / span_s if span_s > 0 else None,
        gap_cv=float(gaps.std() / gaps.mean()) if span_s > 0 else None,
        window_s=window_s,
        peak_rate_per_s=float(counts.max() / window_s),
        peak_over_mean=float(counts.max() / counts.mean()),
        prompt=_lengths([request.prompt_tokens for request in arrivals]),
        output=_lengths([request.output_tokens for request in arrivals]),
        kv=None if stay is None else demand_of(arrivals, stay),
    )


def _lengths(tokens: Sequence[int]) -> LengthStatistics:
    return LengthStatistics(mean=float(np.mean(tokens)), p99=float(np.percentile(tokens, 99)), longest=max(tokens))
