"""Checks of the numbers that a trace is made from."""

import math
from collections.abc import Sequence

from pengserve.planners.types.errors import ConfigError


def above_zero(**values: float) -> None:
    """Raise ConfigError unless each value is a number above 0."""
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} must be a number above 0, got {value!r}")


def not_negative(**values: float) -> None:
    """Raise ConfigError unless each value is a number, 0 or more."""
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} must be a number, 0 or more, got {value!r}")


def share(**values: float) -> None:
    """Raise ConfigError unless each value is from 0 to 1."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ConfigError(f"{name} must be from 0 to 1, got {value!r}")


def span(**values: Sequence[float]) -> None:
    """Raise ConfigError unless each value is a pair of numbers above 0, the lower one first."""
    for name, pair in values.items():
        if len(pair) != 2 or not 0 < pair[0] <= pair[1] < math.inf:
            raise ConfigError(f"{name} must be two numbers above 0, the lower one first, got {list(pair)!r}")
