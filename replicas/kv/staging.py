"""How the cells of a step's staged layers follow each other through too few cells.

The layers of a step are computed one after the other, so a cell that a layer has read may take KV of a later one. The
free cells are a ring: each layer takes the next ones, and its copies wait for the last layer that had any of them.

    num_cells >= all that is staged      no cell is used twice; what was staged can stay afterwards
    num_cells >= two layers' worth       a layer is copied while the one before it computes
    num_cells >= the largest layer       a layer is copied once the one before it has been read
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Turn:
    """One layer's part of the ring."""

    layer: int
    places: np.ndarray  # in the ring
    after: int | None  # the layer that must have been read before these cells are written


def turns(counts: Sequence[int], num_cells: int) -> list[Turn]:
    """Who has which cells of the ring, layer by layer.

    Args:
        counts: blocks to stage, by layer.

    Raises ValueError where a layer does not fit.
    """
    found: list[Turn] = []
    spans: list[tuple[int, int]] = []  # (layer, first place of it), unwrapped
    start = 0
    for layer, count in enumerate(counts):
        if count > num_cells:
            raise ValueError(f"layer {layer} stages {count} blocks, and the ring has {num_cells} cells")
        if not count:
            continue
        stop = start + count
        # Unwrapped places [first, first + n) of an earlier layer come again from first + num_cells on.
        after = next((earlier for earlier, first in reversed(spans) if stop > first + num_cells), None)
        found.append(Turn(layer, np.arange(start, stop) % num_cells, after))
        spans.append((layer, start))
        start = stop
    return found


def levels(counts: np.ndarray, movable: np.ndarray, num_free: int, num_areas: int) -> np.ndarray | None:
    """How many blocks of each layer leave the device so that the rest can be staged: equally many are staged in all.

    Args:
        counts: blocks to stage already, by layer.
        movable: blocks of each layer that may leave.
        num_free: cells that are free.
        num_areas: 2: a layer is copied while another computes; 1: one after the other; 0: nothing is staged yet.

    Returns:
        Blocks to take out by layer, as few as will do; None where all together are too few.
    """
    if num_free >= num_areas * counts.max():
        return np.zeros_like(counts)
    tried = np.arange(int(counts.max()), int((counts + movable).max()) + 1)
    leaving = np.clip(tried[:, None] - counts, 0, movable)
    enough = num_free + leaving.sum(axis=1) >= num_areas * (counts + leaving).max(axis=1)
    return leaving[int(enough.argmax())] if enough.any() else None
