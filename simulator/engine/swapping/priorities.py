"""How priorities change: FastSwitch section 4.2. The lower number is the more urgent."""

import random
from collections.abc import Collection

STAYS = 0.7  # probability that a conversation that was served lately is among the urgent, in the Markov pattern


class Priorities:
    """Of conversations: one number each, which an update draws anew."""

    def __init__(self, pattern: str, seed: int) -> None:
        """`pattern`: "random", or "markov": with temporal locality."""
        self._is_markov = pattern == "markov"
        self._rng = random.Random(f"priorities {seed}")
        self._found: dict[str, float] = {}

    def of(self, conversation: str) -> float:
        """Its priority; one that was never seen gets one."""
        if conversation not in self._found:
            self._found[conversation] = self._rng.random()
        return self._found[conversation]

    def update(self, here: Collection[str], served: Collection[str]) -> None:
        """Draws priorities anew for the conversations that are `here`; `served` ran lately."""
        for conversation in sorted(here):
            found = self._rng.random()
            if self._is_markov and conversation in served and self._rng.random() < STAYS:
                found *= 0.5
            elif self._is_markov:
                found = 0.25 + 0.75 * found
            self._found[conversation] = found
