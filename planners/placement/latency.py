"""How long a decode step takes where some layers' KV comes from the host: OrbitFlow's Algorithm 1.

A layer begins when the one before it has ended and its own KV is there; until then the device stalls. As in Algorithm 1
copies begin with the step and run beside the computation. Two things are as in `replicas.kv.staging`, and not as in the
paper:

    order     the layer that is needed first is copied first, at the whole rate of the link; the paper divides the link
              evenly among requests, so that what is needed late delays what is needed soon
    room      copies take turns in the cells that are free, and wait for the layer that had them before; the paper lets
              each request have a layer in flight, also where the buffer of its Eq. 1 does not hold them all

For a batch with one spread, and cells for one layer, all of these are the same.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Cells = NDArray[np.float32]  # counts of them: far below 2^24, so exact
Seconds = NDArray[np.float64]


def stall_s(staged: Sequence[int], layer_s: float, cells_per_s: float, num_free: int) -> float:
    """Seconds of a step in which layers wait for their KV; infinite where a layer does not fit.

    Args:
        staged: cells that each layer needs from the host, by layer.
        layer_s: computing one layer.
        cells_per_s: over the link.
        num_free: cells that copies take turns in.
    """
    if max(staged, default=0) > num_free:
        return float("inf")
    computed_s = copied_s = stalled_s = 0.0  # when the layer before has been computed, and when the last copy has ended
    taken: list[tuple[int, float]] = []  # by staged layer: its first place in the ring, unwrapped; when it was read
    oldest = stop = 0
    for count in staged:
        if count:
            first, stop = stop, stop + count
            free_s = 0.0
            while oldest < len(taken) and stop > taken[oldest][0] + num_free:
                free_s = taken[oldest][1]
                oldest += 1
            if free_s > copied_s:
                copied_s = free_s
            copied_s += count / cells_per_s
            if copied_s > computed_s:
                stalled_s += copied_s - computed_s
                computed_s = copied_s
            computed_s += layer_s
            taken.append((first, computed_s))
        else:
            computed_s += layer_s
    return stalled_s


def least_stalls_s(staged: Cells, layer_s: float, cells_per_s: float, num_free: Cells) -> Seconds:
    """What `stall_s` is at least, of many steps at once.

    Args:
        staged: float32 `[steps, layers]`.
        num_free: `[steps]`.

    Returns:
        `[steps]`; infinite where a layer does not fit.
    """
    # No layer begins before all that is copied until then has come over the link.
    late_s = np.cumsum(staged, axis=1)
    late_s *= np.float32(1.0 / cells_per_s)
    late_s -= np.arange(staged.shape[1], dtype=np.float32) * np.float32(layer_s)
    found = np.maximum(late_s.max(axis=1), 0.0)
    peaks = staged.max(axis=1)
    tight = 2 * peaks > num_free
    if tight.any():
        # A layer that does not fit beside the one before it is copied when that one has been read.
        first, second = staged[:, :-1], staged[:, 1:]
        waits = (first + second > num_free[:, None]) & (first > 0)
        found = np.maximum(found, (second * waits).sum(axis=1) / cells_per_s)
    return np.where(peaks <= num_free, found * (1.0 - 1e-5), np.inf)
