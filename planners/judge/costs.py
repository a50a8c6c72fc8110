"""What a step costs in each shape: as profiled and at the speed that was measured, as measured alone, or by a law."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2

import numpy as np

from pengserve.planners.columns import Floats
from pengserve.planners.types.layout import GroupKind, degree_of
from pengserve.planners.types.step_cost import NOMINAL, TERMS, StepCost

BELIEF_S = 2.0  # seconds of steps that a profile counts as
RIDGE = 1e-4  # weight of the guess that a fit begins with, where that of what was measured is 1
TP_EFFICIENCY, PP_EFFICIENCY = 0.85, 0.92  # of shapes that were neither profiled nor run, of what dp does


@dataclass(frozen=True, slots=True)
class Work:
    """Steps of one shape, of late: the sums of squares that a fit needs, and those that a speed needs."""

    gram: Floats
    moment: Floats
    seconds: float


class Costs:
    """A `StepCost` for each shape: as profiled, at the speed that was measured; or as measured alone."""

    def __init__(self, profiles: Mapping[str, StepCost], work: Mapping[str, Work]) -> None:
        self._profiles, self._work = profiles, work
        self._found: dict[str, StepCost | None] = {}

    def of(self, shape: str) -> StepCost | None:
        """Of one shape; None where nothing is known of it."""
        if shape not in self._found:
            self._found[shape] = self._make(shape)
        return self._found[shape]

    def _make(self, shape: str) -> StepCost | None:
        first = self._profiles.get(shape) or (None if shape == GroupKind.DP else self._by_law(shape))
        work = self._measured(shape)
        if work is not None:
            return _fitted(work) if first is None else _scaled(first, _speed(first, work))
        if first is None or shape in self._profiles:
            return first
        return _scaled(first, self._speed_of_kin(shape))

    def _measured(self, shape: str) -> Work | None:
        work = self._work.get(shape)
        return None if work is None or work.seconds < BELIEF_S else work

    def _speed_of_kin(self, shape: str) -> float:
        """By how much longer a shape's steps take than its law says, as far as the next one of its kind tells.

        What a group of two was measured to lose, one of four loses twice.
        """
        kind, doublings = shape[:2], log2(degree_of(shape))
        kin = [
            s for s in self._work if s != shape and s.startswith(kind) and self._measured(s) and s not in self._profiles
        ]
        nearest = min(kin, key=lambda s: (abs(log2(degree_of(s)) - doublings), s), default=None)
        first, work = (None, None) if nearest is None else (self._by_law(nearest), self._measured(nearest))
        if nearest is None or first is None or work is None:
            return 1.0
        speed: float = _speed(first, work) ** (doublings / log2(degree_of(nearest)))
        return speed

    def _by_law(self, shape: str) -> StepCost | None:
        """Of a shape that was never profiled nor run: a share of what dp does."""
        alone = self.of(GroupKind.DP)
        if alone is None:
            return None
        degree = degree_of(shape)
        if shape.startswith(GroupKind.PP):
            factors = (1.0 / PP_EFFICIENCY,) * len(TERMS)
        else:
            shared = 1.0 / (degree * TP_EFFICIENCY)
            factors = (shared, shared, shared, 1.0, shared, shared)  # each member samples for all sequences
        values = [value * factor for value, factor in zip(alone.terms, factors, strict=True)]
        return StepCost(**dict(zip(TERMS, values, strict=True)))


def _speed(cost: StepCost, work: Work) -> float:
    """Seconds that the steps took, over those of `cost`."""
    expected_s = float(np.array(cost.terms) @ work.moment)
    return (work.seconds + BELIEF_S) / (expected_s + BELIEF_S)


def _scaled(cost: StepCost, factor: float) -> StepCost:
    return StepCost(**{name: factor * value for name, value in zip(TERMS, cost.terms, strict=True)})


def _fitted(work: Work) -> StepCost:
    """Least squares over the looks; a term that would be negative is left out.

    Looks at steady traffic are alike, and do not tell terms apart: they have the proportions of `NOMINAL` then.
    """
    scale = np.sqrt(np.maximum(np.diag(work.gram), 1e-30))
    gram, moment = work.gram / np.outer(scale, scale), work.moment / scale
    nominal = np.array(NOMINAL.terms)
    guess = nominal * scale * work.seconds / float(nominal @ work.moment)
    used = [at for at in range(len(TERMS)) if work.moment[at] > 0]
    while used:
        ridge = gram[np.ix_(used, used)] + RIDGE * np.eye(len(used))
        found = np.linalg.solve(ridge, moment[used] + RIDGE * guess[used])
        if found.min() >= 0:
            break
        del used[int(np.argmin(found))]
    terms = dict.fromkeys(TERMS, 0.0)
    terms.update({TERMS[at]: float(value / scale[at]) for at, value in zip(used, found, strict=True)})
    return StepCost(**terms)
