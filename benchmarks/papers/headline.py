"""One headline figure of a paper, and which of ours stands beside it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Figures = Mapping[str, float]
Runs = Mapping[tuple[str, str], Figures]  # (scenario, label) -> figures
OURS = "PengServe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One figure of a paper, and how it comes out here."""

    row: str
    what: str
    scenario: str
    baseline: str
    paper: str
    get: Callable[[Figures], float]
    subject: str = OURS
    is_rate: bool = False  # more is better: the ratio is PengServe's / baseline's
    is_points: bool = False  # a share: points that PengServe has more, in place of a ratio
    unit: str = "s"

    def values(self, runs: Runs) -> tuple[float, float]:
        """The baseline's, and ours."""
        return tuple(self.get(runs[self.scenario, label]) for label in (self.baseline, self.subject))  # type: ignore[return-value]

    def ratio(self, runs: Runs) -> float:
        """How many times better ours is, or points; not a number where one of them is not known."""
        theirs, ours = self.values(runs)
        if self.is_points:
            return 100.0 * (ours - theirs)
        over, under = (ours, theirs) if self.is_rate else (theirs, ours)
        return over / under if under else float("nan")


def named(name: str) -> Callable[[Figures], float]:
    """The figure of that name; not a number where a run has none."""
    return lambda figures: figures.get(name, float("nan"))
