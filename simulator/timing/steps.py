"""How long a step takes, as lanes ask for it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pengserve.planners.cost_model import Chunk


class Batch(NamedTuple):
    """What one step computes. Decodes are counted, not listed: there are hundreds of them, in millions of steps."""

    num_decodes: int  # requests that compute one token
    context_tokens: int  # of all decodes together, the new tokens counted
    prefills: tuple[Chunk, ...] = ()  # of more than one token, or the last one of a prompt


class StepTimes(Protocol):
    """Seconds of steps of one model on one kind of instance, or of a group of them, in one shape."""

    def step_s(self, batch: Batch) -> float:
        """Seconds of one step of the whole model."""
        ...

    def decodes_s(self, batch: Batch, num_steps: int) -> float:
        """Seconds of `num_steps` steps in a row, each of the same decodes with one token more. `batch` is the first.

        The sum of `step_s` over them, in closed form: a cluster of a thousand instances makes millions of such steps.
        """
        ...

    def steps_within(self, batch: Batch, seconds: float) -> int:
        """How many of those steps end within `seconds`: the inverse of `decodes_s`, rounded down."""
        ...


class ModelTimes(StepTimes, Protocol):
    """Those of a whole model, which can be cut into stages."""

    def stage(self, num_stages: int) -> StepTimes:
        """One of so many stages with as many layers each: its share of the layers' time, and all of the host's part."""
        ...


def prefill_tokens(chunks: Sequence[Chunk]) -> int:
    """New tokens of prefill chunks."""
    return sum(chunk.num_tokens for chunk in chunks)
