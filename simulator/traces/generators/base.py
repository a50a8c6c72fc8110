"""What generators share."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces.generators.lengths import Lengths


class Generator(Protocol):
    """A kind of traffic: a frozen value, whose fields are what a user may choose."""

    default_lengths: ClassVar[Lengths | None]  # None: they must be given

    def generate(self, lengths: Lengths, seed: int) -> tuple[Arrival, ...]:
        """A trace. The same seed gives the same trace; other lengths leave the arrivals as they are.

        Raises:
            ConfigError: no request arrives.
        """
        ...


def trace_of(
    at_s: NDArray[np.float64],
    lengths: Lengths,
    rng: np.random.Generator,
    priorities: Sequence[int] | None = None,
    degrees: Sequence[int | None] | None = None,
) -> tuple[Arrival, ...]:
    """Requests at these times, in order, with lengths drawn from `rng`.

    Raises:
        ConfigError: there are none.
    """
    if not len(at_s):
        raise ConfigError("no request arrives at this rate in this time: give a higher rate or a longer duration_s")
    prompts, outputs = lengths.draw(rng, len(at_s))
    return tuple(
        Arrival(
            request_id=f"r{i}",
            at_s=round(at, 6),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            priority=priorities[i] if priorities is not None else 0,
            degree=degrees[i] if degrees is not None else None,
        )
        for i, (at, prompt_tokens, output_tokens) in enumerate(
            zip(at_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
        )
    )
