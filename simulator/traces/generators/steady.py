"""Traffic whose rate is given: Poisson, Gamma, and ramps."""

from dataclasses import dataclass
from typing import ClassVar

from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces import checks
from pengserve.simulator.traces.generators.base import trace_of
from pengserve.simulator.traces.generators.lengths import Lengths
from pengserve.simulator.traces.generators.rates import RateCurve
from pengserve.simulator.traces.randomness import streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisson:
    """Requests that know nothing of each other."""

    default_lengths: ClassVar[Lengths | None] = None

    rate_per_s: float
    duration_s: float

    def __post_init__(self) -> None:
        checks.above_zero(rate_per_s=self.rate_per_s, duration_s=self.duration_s)

    def generate(self, lengths: Lengths, seed: int) -> tuple[Arrival, ...]:
        """As `Generator`."""
        return Gamma(rate_per_s=self.rate_per_s, duration_s=self.duration_s, cv=1.0).generate(lengths, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gamma:
    """Gamma-distributed gaps: burstier than Poisson with a `cv` above 1, smoother below."""

    default_lengths: ClassVar[Lengths | None] = None

    rate_per_s: float
    duration_s: float
    cv: float  # standard deviation of the gaps over their mean

    def __post_init__(self) -> None:
        checks.above_zero(rate_per_s=self.rate_per_s, duration_s=self.duration_s, cv=self.cv)

    def generate(self, lengths: Lengths, seed: int) -> tuple[Arrival, ...]:
        """As `Generator`."""
        times, sizes = streams(seed, "gamma", 2)
        curve = RateCurve.of_levels([(self.duration_s, self.rate_per_s)])
        return trace_of(curve.arrivals(times, self.cv), lengths, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """A rate that goes straight from each of `points` (at_s, requests per second) to the next."""

    default_lengths: ClassVar[Lengths | None] = None

    points: tuple[tuple[float, float], ...]
    cv: float = 1.0

    def __post_init__(self) -> None:
        checks.above_zero(cv=self.cv)
        RateCurve(self.points)  # refuses what is no curve

    def generate(self, lengths: Lengths, seed: int) -> tuple[Arrival, ...]:
        """As `Generator`."""
        times, sizes = streams(seed, "ramp", 2)
        return trace_of(RateCurve(self.points).arrivals(times, self.cv), lengths, sizes)
