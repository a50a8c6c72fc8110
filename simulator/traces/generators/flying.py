"""Traffic of Flying Serving's evaluation (§6.1.3, §6.3): low load and bursts in turns, and a mix of priorities."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces import checks
from pengserve.simulator.traces.generators.base import trace_of
from pengserve.simulator.traces.generators.lengths import Lengths, UniformLengths
from pengserve.simulator.traces.generators.rates import Floats, RateCurve
from pengserve.simulator.traces.randomness import streams

FLYING_LENGTHS = UniformLengths(prompt=(128, 4000), output=(64, 512))


@dataclass(frozen=True, slots=True, kw_only=True)
class Flying:
    """Phases of low load and of bursts in turns, until there are `num_requests`.

    Each phase has one rate, drawn from its range. How long phases are is not in the paper.
    """

    default_lengths: ClassVar[Lengths | None] = FLYING_LENGTHS

    num_requests: int = 4000
    low_rate_per_s: tuple[float, float] = (2.0, 5.0)
    burst_rate_per_s: tuple[float, float] = (10.0, 30.0)
    low_s: float = 60.0
    burst_s: float = 30.0

    def __post_init__(self) -> None:
        checks.above_zero(num_requests=self.num_requests, low_s=self.low_s, burst_s=self.burst_s)
        checks.span(low_rate_per_s=self.low_rate_per_s, burst_rate_per_s=self.burst_rate_per_s)

    def generate(self, lengths: Lengths, seed: int) -> tuple[Arrival, ...]:
        """As `Generator`."""
        times, sizes = streams(seed, "flying", 2)
        at_s: Floats = np.empty(0)
        start_s = 0.0
        for seconds, rates in self._phases():
            arrivals = RateCurve.of_levels([(seconds, times.uniform(*rates))]).arrivals(times)
            at_s = np.concatenate([at_s, start_s + arrivals])
            start_s += seconds
            if len(at_s) >= self.num_requests:
                break
        return trace_of(at_s[: self.num_requests], lengths, sizes)

    def _phases(self) -> Iterator[tuple[float, tuple[float, float]]]:
        while True:
            yield self.low_s, self.low_rate_per_s
            yield self.burst_s, self.burst_rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityMix:
    """Requests of two priorities at a rate that moves between two; a new one is drawn every `phase_s`.

    How many have priority is not in the paper.
    """

    default_lengths: ClassVar[Lengths | None] = FLYING_LENGTHS

    duration_s: float = 600.0
    rate_per_s: tuple[float, float] = (3.0, 5.0)
    phase_s: float = 30.0
    priority_share: float = 0.2
    priority: int = -1  # as in vLLM: below zero is urgent
    degree: int | None = None  # that urgent requests ask for; None: any

    def __post_init__(self) -> None:
        checks.above_zero(duration_s=self.duration_s, phase_s=self.phase_s)
        checks.span(rate_per_s=self.rate_per_s)
        checks.share(priority_share=self.priority_share)
        if self.degree is not None:
            checks.above_zero(degree=self.degree)

    def generate(self, lengths: Lengths, seed: int) -> tuple[Arrival, ...]:
        """As `Generator`."""
        times, sizes, ranks = streams(seed, "priority", 3)
        starts = np.arange(0.0, self.duration_s, self.phase_s)
        seconds = np.minimum(self.phase_s, self.duration_s - starts)
        rates = times.uniform(*self.rate_per_s, size=len(starts))
        at_s = RateCurve.of_levels(list(zip(seconds.tolist(), rates.tolist(), strict=True))).arrivals(times)
        urgent = (ranks.random(len(at_s)) < self.priority_share).tolist()
        priorities = [self.priority if is_urgent else 0 for is_urgent in urgent]
        return trace_of(at_s, lengths, sizes, priorities, [self.degree if is_urgent else None for is_urgent in urgent])
