"""A placement where it pays: what the search finds must beat what is in force, and what pausing alone comes to.

    as it is    nothing changes
    whole       no layer is away, and as few requests as that takes are paused
    searched    `solve`: layers away, or others paused

Each beats those before it by fewer SLOs missed, or by `min_gain` more tokens a second with its move counted. The search
itself is left out where its bounds say that it cannot.
"""

import math
from collections.abc import Sequence

import numpy as np

from pengserve.planners.placement.pausing import Prospects, victims
from pengserve.planners.placement.solver import Candidate, as_it_is, searched, whole
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig, Solution


def solve_where_it_pays(
    requests: Sequence[Decode], machine: Machine, config: PlacementConfig | None = None
) -> Solution:
    """The placement for the next steps, which may be the one in force. Pure; as long as `solve`, or much shorter."""
    config = config or PlacementConfig()
    best = as_it_is(requests, machine, config)
    other = whole(requests, machine, config)
    if other is not None and (best is None or _is_better(other, best, machine, config)):
        best = other
    prospects = Prospects(requests, victims(requests, config), machine, config)
    if best is None or _can_be_beaten(best, prospects):
        found = searched(requests, prospects)
        if best is None or _is_better(found, best, machine, config):
            best = found
    return best.solution()


def _is_better(found: Candidate, than: Candidate, machine: Machine, config: PlacementConfig) -> bool:
    if not found.num_stepped or not math.isfinite(found.step_s):
        return False
    if found.num_late != than.num_late:
        return found.num_late < than.num_late
    took_s = found.step_s + found.num_moved() / machine.cells_per_s / found.window
    return took_s / found.num_stepped * (1.0 + config.min_gain) < than.step_s / max(1, than.num_stepped)


def _can_be_beaten(best: Candidate, prospects: Prospects) -> bool:
    """Whether any number of paused requests could come to fewer SLOs missed, or to more tokens a second."""
    config, prospect = prospects.config, prospects.after(prospects.config.min_window)
    if (prospect.num_late[np.isfinite(prospect.step_s)] < best.num_late).any():
        return True
    tokens_per_s = prospect.num_stepped / prospect.step_s
    least = best.num_stepped / best.step_s * (1.0 + config.min_gain)
    return bool(((tokens_per_s > least) & (prospect.num_late <= best.num_late)).any())
