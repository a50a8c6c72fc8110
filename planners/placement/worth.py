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
from pengserve.planners.placement.solver import as_it_is, solve, whole
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig, Solution


def solve_where_it_pays(
    requests: Sequence[Decode], machine: Machine, config: PlacementConfig | None = None
) -> Solution:
    """The placement for the next steps, which may be the one in force. Pure; as long as `solve`, or much shorter."""
    config = config or PlacementConfig()
    best = as_it_is(requests, machine, config)
    other = whole(requests, machine, config)
    if other is not None and (best is None or _is_better(other, best, requests, machine, config)):
        best = other
    if best is None:
        return solve(requests, machine, config)
    prospects = Prospects(requests, victims(requests, config), machine, config)
    if not _can_be_beaten(best, prospects):
        return best
    found = solve(requests, machine, config, prospects)
    return found if _is_better(found, best, requests, machine, config) else best


def _is_better(
    found: Solution, than: Solution, requests: Sequence[Decode], machine: Machine, config: PlacementConfig
) -> bool:
    if not found.spreads or not math.isfinite(found.step_s):
        return False
    if found.num_late != than.num_late:
        return found.num_late < than.num_late
    took_s = found.step_s + _moved_cells(found, requests, machine) / machine.cells_per_s / found.window
    return took_s / len(found.spreads) * (1.0 + config.min_gain) < than.step_s / max(1, len(than.spreads))


def _moved_cells(found: Solution, requests: Sequence[Decode], machine: Machine) -> int:
    """Cells that come or go before it is in force, those of requests that go on among them."""
    stepped = dict(found.spreads)
    back = [r for r in requests if not r.is_stepped and r.request_id in stepped]
    return found.moved_cells + sum(r.num_tokens // machine.block_size for r in back) * machine.num_layers


def _can_be_beaten(best: Solution, prospects: Prospects) -> bool:
    """Whether any number of paused requests could come to fewer SLOs missed, or to more tokens a second."""
    config, prospect = prospects.config, prospects.after(prospects.config.min_window)
    if (prospect.num_late[np.isfinite(prospect.step_s)] < best.num_late).any():
        return True
    tokens_per_s = prospect.num_stepped / prospect.step_s
    least = len(best.spreads) / best.step_s * (1.0 + config.min_gain)
    return bool(((tokens_per_s > least) & (prospect.num_late <= best.num_late)).any())
