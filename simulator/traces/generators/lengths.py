"""How long prompts and outputs are."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.traces import checks
from pengserve.simulator.traces.loading import load_lengths

_Z99 = 2.3263478740408408  # of the standard normal distribution, 99 % are below it

Tokens = NDArray[np.int64]


class Lengths(Protocol):
    """Draws prompt and output lengths, in tokens, all of 1 or more."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        """`count` prompts and outputs, two arrays [count]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformLengths:
    """Every length between two is equally likely, both included."""

    prompt: tuple[int, int]
    output: tuple[int, int]

    def __post_init__(self) -> None:
        checks.span(prompt=self.prompt, output=self.output)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        """As `Lengths`."""
        prompts = rng.integers(self.prompt[0], self.prompt[1], size=count, endpoint=True)
        return prompts, rng.integers(self.output[0], self.output[1], size=count, endpoint=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LognormalLengths:
    """Lognormal lengths with a given mean and 99th percentile, cut at a longest one."""

    prompt_mean: float
    prompt_p99: float
    output_mean: float
    output_p99: float
    prompt_max: int = 1 << 20
    output_max: int = 1 << 20

    def __post_init__(self) -> None:
        checks.above_zero(prompt_max=self.prompt_max, output_max=self.output_max)
        fit_lognormal(self.prompt_mean, self.prompt_p99, "prompt")
        fit_lognormal(self.output_mean, self.output_p99, "output")

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        """As `Lengths`."""
        prompts = rng.lognormal(*fit_lognormal(self.prompt_mean, self.prompt_p99, "prompt"), size=count)
        outputs = rng.lognormal(*fit_lognormal(self.output_mean, self.output_p99, "output"), size=count)
        return _whole(prompts, self.prompt_max), _whole(outputs, self.output_max)


@dataclass(frozen=True, slots=True)
class SampledLengths:
    """Pairs of lengths drawn from given ones, each pair as it stands: long prompts keep their outputs."""

    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def from_file(cls, path: Path) -> "SampledLengths":
        """Those of a file of lengths, or of the requests of a trace.

        Raises:
            ConfigError: as `loading.load_lengths`.
        """
        return cls(load_lengths(path))

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        """As `Lengths`."""
        chosen = np.array(self.pairs, dtype=np.int64)[rng.integers(0, len(self.pairs), size=count)]
        return chosen[:, 0], chosen[:, 1]


def fit_lognormal(mean: float, p99: float, name: str) -> tuple[float, float]:
    """`(mu, sigma)` of the lognormal distribution with this mean and 99th percentile.

    With z the 99th percentile of the normal distribution, ln(p99 / mean) = z sigma - sigma^2 / 2. The smaller root is
    taken; there is none above p99 / mean = exp(z^2 / 2), which is about 15.

    Raises:
        ConfigError: no lognormal distribution has them.
    """
    checks.above_zero(**{f"{name}_mean": mean, f"{name}_p99": p99})
    log_ratio = math.log(p99 / mean)
    if not 0 <= log_ratio <= _Z99**2 / 2:
        most = math.exp(_Z99**2 / 2)
        raise ConfigError(
            f"{name}_p99 must be from 1 to {most:.1f} times {name}_mean ({mean!r}) for a lognormal length, got {p99!r}"
        )
    sigma = _Z99 - math.sqrt(_Z99**2 - 2 * log_ratio)
    return math.log(mean) - sigma**2 / 2, sigma


def _whole(values: NDArray[np.float64], most: int) -> Tokens:
    return np.clip(np.rint(values), 1, most).astype(np.int64)
