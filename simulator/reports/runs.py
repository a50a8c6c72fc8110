"""Runs with their figures, all scaled from the same limits, so that they compare."""

from collections.abc import Sequence
from dataclasses import dataclass

from pengserve.simulator.reports.figures import Figures, base_of, figures_of
from pengserve.simulator.reports.layouts import LayoutSpan, layout_spans
from pengserve.simulator.reports.slo import SloBase
from pengserve.simulator.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What reports are made of."""

    result: Result
    figures: Figures
    spans: tuple[LayoutSpan, ...]  # its layouts, one after the other

    @property
    def title(self) -> str:
        """How the run is called where there are others."""
        return self.result.name


def runs_of(results: Sequence[Result], base: SloBase | None = None) -> tuple[Run, ...]:
    """`results` with their figures. SLOs scale from `base`, or else from what `base_of` finds."""
    base = base or base_of(results)
    return tuple(Run(result=result, figures=figures_of(result, base), spans=layout_spans(result)) for result in results)
