"""Arrivals from a rate that changes over time."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.types.errors import ConfigError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RateCurve:
    """A rate in requests per second, linear between its points `(at_s, rate)`. Two points at one time are a step."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        times = [at_s for at_s, _ in self.points]
        if len(times) < 2 or times[0] != 0 or times != sorted(times) or not 0 < times[-1] < float("inf"):
            raise ConfigError("points must be two or more [at_s, rate] by time, the first at 0 s")
        if not all(0 <= rate < float("inf") for _, rate in self.points) or self.expected[-1] <= 0:
            raise ConfigError("points must have rates of 0 or more requests per second, and not all of them 0")

    @classmethod
    def of_levels(cls, levels: Sequence[tuple[float, float]]) -> "RateCurve":
        """The curve that keeps each rate of `(seconds, rate)` for so long, one after the other."""
        points: list[tuple[float, float]] = []
        at_s = 0.0
        for seconds, rate in levels:
            points += [(at_s, rate), (at_s + seconds, rate)]
            at_s += seconds
        return cls(tuple(points))

    @property
    def duration_s(self) -> float:
        """Where it ends."""
        return self.points[-1][0]

    @property
    def expected(self) -> Floats:
        """Requests that are expected before each point."""
        times, rates = np.array(self.points, dtype=float).T
        return np.concatenate([[0.0], np.cumsum(np.diff(times) * (rates[1:] + rates[:-1]) / 2)])

    def arrivals(self, rng: np.random.Generator, cv: float = 1.0) -> Floats:
        """Seconds at which requests arrive, in order.

        Gaps that are Gamma-distributed with mean 1 and coefficient of variation `cv` (1: a Poisson process) are drawn
        on the axis of expected requests and mapped back to time. So they stay that bursty at every rate.
        """
        return self.at(_renewals(self.expected[-1], cv, rng))

    def at(self, counts: Floats) -> Floats:
        """When so many requests are expected to have come: the inverse of the integral of the rate."""
        times, rates = np.array(self.points, dtype=float).T
        expected = self.expected
        # Sections in which nothing arrives hold no count; `right` steps over them, and over the width 0 of a step.
        section = np.clip(np.searchsorted(expected, counts, side="right") - 1, 0, len(times) - 2)
        rest = counts - expected[section]
        rate = rates[section]
        slope = (rates[section + 1] - rate) / np.maximum(times[section + 1] - times[section], 1e-12)
        # The root of slope/2 x^2 + rate x = rest, in the form that also holds where the slope is 0.
        root = np.sqrt(np.maximum(rate**2 + 2 * slope * rest, 0.0))
        return np.asarray(times[section] + 2 * rest / np.maximum(rate + root, 1e-300))


def _renewals(total: float, cv: float, rng: np.random.Generator) -> Floats:
    shape = 1.0 / cv**2
    drawn: list[Floats] = []
    reached = 0.0
    while reached < total:
        gaps = rng.gamma(shape, 1.0 / shape, size=int(total - reached) + 64)
        drawn.append(reached + np.cumsum(gaps))
        reached = float(drawn[-1][-1])
    counts = np.concatenate(drawn)
    return counts[counts < total]
