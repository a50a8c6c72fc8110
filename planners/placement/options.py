"""All spreads of so many layers as tables, made once: options are the places in `spreads(num_layers)`."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.placement.spread import Spread, mask_of, spreads


@cache
def numbers(num_layers: int) -> dict[Spread, int]:
    """Where each spread is among `spreads`."""
    return {spread: index for index, spread in enumerate(spreads(num_layers))}


@cache
def masks(num_layers: int) -> NDArray[np.float32]:
    """Which layers each option keeps away, `[options, layers]`."""
    return np.array([mask_of(spread, num_layers) for spread in spreads(num_layers)])


@cache
def moves(spread: Spread, num_layers: int, can_leave_free: bool) -> NDArray[np.float32]:
    """How many layers of a request that has this spread move for each option, those that come and those that leave:
    `[options]`. What leaves costs nothing where the host has a copy (`can_leave_free`).
    """
    away = spread.layers(num_layers)
    stay = masks(num_layers)[:, list(away)].sum(axis=1)  # layers that are on the host before and after
    come = np.float32(len(away)) - stay
    leave = masks(num_layers).sum(axis=1) - stay
    return np.asarray(come if can_leave_free else come + leave)


@cache
def layers_of_options(num_layers: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The layers that each option but `RESIDENT` keeps away, one option after the other, and where each begins."""
    layers = [spread.layers(num_layers) for spread in spreads(num_layers)[1:]]
    starts = np.cumsum([0, *map(len, layers)])[:-1]
    return np.array([layer for option in layers for layer in option]), starts
