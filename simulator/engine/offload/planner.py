"""What a policy of offloading in decode decides: a spread for each request, and who is paused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pengserve.planners.placement.spread import Spread
from pengserve.planners.placement.values import Decode, Machine


@dataclass(frozen=True, slots=True)
class Placed:
    """For the next step."""

    spreads: Mapping[str, Spread]  # by request, of those that are stepped
    paused: frozenset[str] = field(default_factory=frozenset)


class OffloadPlanner(Protocol):
    """One policy, with what it remembers."""

    def place(self, requests: Sequence[Decode], machine: Machine, last_step_s: float | None) -> Placed:
        """Says what is where in the next step.

        Args:
            requests: all that decode, paused ones too, with the spreads that they have; the oldest first.
            last_step_s: what the step before took; None where prompts were computed since.
        """
        ...


def uniform(requests: Sequence[Decode], spread: Spread) -> Placed:
    """One spread for all, and none is paused."""
    return Placed({request.request_id: spread for request in requests})
