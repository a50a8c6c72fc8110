"""What decode steps of a lane take, learned from the steps themselves, as the planner of placements wants it."""

import math
from dataclasses import replace

from pengserve.planners.decayed_line import DecayedLine
from pengserve.planners.placement.values import Machine
from pengserve.planners.placement.watch import SMOOTHING, remeasured

FORGET = 0.98  # of all steps before, with each new one
MIN_STEPS = 16
MIN_SPREAD = 0.1  # of the context's mean, by which it must vary before its price is known


def context_share(line: DecayedLine) -> float | None:
    """What part of a step of the mean context the context costs; None: it has varied too little to say.

    Args:
        line: x is tokens of KV that a step reads, y its seconds.
    """
    if line.weight < MIN_STEPS or line.x <= 0 or line.y <= 0 or line.variance <= (MIN_SPREAD * line.mean_x) ** 2:
        return None
    return min(0.95, max(0.0, line.slope * line.mean_x / line.mean_y))


class StepFigures:
    """Begins with the first step that is measured: until the context has varied, it costs nothing."""

    def __init__(self, num_layers: int, block_size: int) -> None:
        self._num_layers, self._block_size = num_layers, block_size
        self._machine: Machine | None = None
        self._fit = DecayedLine(FORGET)
        self._staged_s: float | None = None  # None: no layer was staged yet

    def learn(self, computed_s: float, context: int) -> None:
        """A step of decoding alone, of which no layer was staged, took so long and read so many tokens of KV."""
        if computed_s <= 0 or not math.isfinite(computed_s):
            return
        if self._machine is None:
            self._machine = Machine(
                num_layers=self._num_layers,
                block_size=self._block_size,
                num_cells=0,
                step_s=computed_s,
                context_s=0.0,
                cells_per_s=1.0,
            )
        self._fit.add(context, computed_s)
        self._machine = remeasured(self._machine, computed_s=computed_s, num_context=context)
        if (share := context_share(self._fit)) is not None:
            mean = self._fit.mean_x
            total_s = self._machine.step_s + self._machine.context_s * mean
            self._machine = replace(self._machine, step_s=(1 - share) * total_s, context_s=share * total_s / mean)

    def learn_staged(self, more_s: float) -> None:
        """A step with staged layers took so much longer than predicted without what each of them takes more."""
        if self._machine is not None:
            before_s, more_s = self._staged_s, max(0.0, more_s)
            self._staged_s = more_s if before_s is None else before_s + SMOOTHING * (more_s - before_s)

    def machine(self, num_cells: int, cells_per_s: float) -> Machine | None:
        """The machine with so many cells and such a link; None before a step was measured."""
        if self._machine is None:
            return None
        return replace(self._machine, num_cells=num_cells, cells_per_s=cells_per_s, staged_s=self._staged_s or 0.0)
