"""Real figures beside simulated ones, and how near they have to be."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.result_files import table


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a real run and of its simulation."""

    what: str
    real: float
    simulated: float
    bar: float | None  # relative error at most; None: for information
    unit: str = "s"

    @property
    def error(self) -> float:
        """Relative, and signed."""
        return self.simulated / self.real - 1.0

    @property
    def is_met(self) -> bool:
        """Whether it is within its bar."""
        return self.bar is None or abs(self.error) <= self.bar

    def row(self) -> list[str]:
        """Of `figure_table`."""
        scale, unit = (1e3, "ms") if self.unit == "s" and self.real < 1.0 else (1.0, self.unit)
        bar = "" if self.bar is None else f"{self.bar:.0%}"
        verdict = "" if self.bar is None else ("met" if self.is_met else "missed")
        values = (f"{value * scale:.3g} {unit}".rstrip() for value in (self.real, self.simulated))
        return [self.what, *values, f"{self.error:+.1%}", bar, verdict]


def figure_table(figures: Iterable[Figure]) -> list[str]:
    """Lines of Markdown."""
    return table(["figure", "real", "simulated", "error", "bar", ""], [figure.row() for figure in figures])


def spread(values: Sequence[float], *percentiles: float) -> tuple[float, ...]:
    """The mean, and the percentiles asked for."""
    return float(np.mean(values)), *(float(value) for value in np.percentile(values, percentiles))
