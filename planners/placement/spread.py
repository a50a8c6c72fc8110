"""How one request's layers are spread over device and host: a distance and a phase (OrbitFlow section 3.3.2).

distance 3, phase 2, of 9 layers:   1 1 0 1 1 0 1 1 0      1: on the device, 0: on the host
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Spread(NamedTuple):
    """Every `distance`-th layer, from layer `phase` on, is on the host; distance 0: none is."""

    distance: int = 0
    phase: int = 0

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers on the host, as `Place` names them."""
        return tuple(range(self.phase, num_layers, self.distance)) if self.distance else ()


RESIDENT = Spread()
AWAY = Spread(1, 0)


@cache
def distances(num_layers: int) -> tuple[int, ...]:
    """The distances that differ in how many layers they keep away, the smallest first; of equals the widest.

    At most `2 sqrt(num_layers)` of them (OrbitFlow's D(L), and distance 1).
    """
    counts = sorted({num_layers // distance for distance in range(1, num_layers + 1)}, reverse=True)
    return tuple(num_layers // count for count in counts)


@cache
def spreads(num_layers: int) -> tuple[Spread, ...]:
    """All spreads that the search knows, `RESIDENT` first."""
    return (RESIDENT, *(Spread(d, phase) for d in distances(num_layers) for phase in range(d)))


@cache
def uniform_spreads(num_layers: int) -> tuple[Spread, ...]:
    """For each distance the two best phases for a whole batch: the latest one, and the latest with a layer more away.

    Any other phase keeps as many layers away as one of these, and needs each of them earlier in the step.
    """
    last = num_layers - 1
    return tuple(dict.fromkeys(Spread(d, phase) for d in distances(num_layers) for phase in (d - 1, last % d)))


@cache
def mask_of(spread: Spread, num_layers: int) -> NDArray[np.float32]:
    """1 for layers on the host, else 0: `[layers]`. Not to be changed."""
    mask = np.zeros(num_layers, dtype=np.float32)
    mask[list(spread.layers(num_layers))] = 1
    return mask


def evenly(num_away: int, num_layers: int, *, at_most: bool = False) -> Spread:
    """The spread that keeps so many layers away, or a few more; `at_most`: or a few less. The latest phase of it."""
    found = [distance for distance in distances(num_layers) if num_layers // distance >= num_away]
    if at_most:
        fewer = [distance for distance in distances(num_layers) if num_layers // distance <= num_away]
        found = fewer[:1]
    if num_away <= 0 or not found:
        return RESIDENT
    return Spread(found[-1], found[-1] - 1)
