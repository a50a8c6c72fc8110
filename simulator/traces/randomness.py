"""Random numbers from a seed, and from nothing else."""

import zlib

import numpy as np

from pengserve.planners.types.errors import ConfigError


def streams(seed: int, purpose: str, count: int = 1) -> list[np.random.Generator]:
    """Independent streams of random numbers. Other purposes get others from the same seed.

    Raises:
        ConfigError: the seed is negative.
    """
    if seed < 0:
        raise ConfigError(f"seed must be a whole number, 0 or more, got {seed!r}")
    sequence = np.random.SeedSequence([seed, zlib.crc32(purpose.encode())])
    return [np.random.default_rng(child) for child in sequence.spawn(count)]
