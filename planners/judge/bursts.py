"""How long a burst will last, by how long earlier ones did.

Of the first burst nothing is known but how long it has lasted: it is expected to go on for twice that. Each burst that
has ended tells of the next one, as lifetimes with one rate of ending do: its mean is what all of them lasted over how
many have ended, and a first guess counts as half of one.
"""

from dataclasses import dataclass
from typing import NamedTuple

LASTS = 2.0  # times as long as it has gone on, until 1/e of a rate is left: where nothing else is known
BURST = 2.0  # times the rate before it: less is no burst that tells of others
APART_S = 5.0  # between two bursts; nearer ones are one
MEMORY = 8.0  # bursts: earlier ones count 1/e


class Phase(NamedTuple):
    """Requests come at one rate for a while now."""

    requests: float
    seconds: float
    before: float | None  # requests by second before it; None where nothing else is known

    @property
    def now(self) -> float:
        """Requests by second."""
        return self.requests / self.seconds

    @property
    def is_burst(self) -> bool:
        """Whether many more come than before."""
        return self.before is not None and self.now >= BURST * self.before


@dataclass(frozen=True, slots=True)
class Bursts:
    """Those of one cluster. A value: a look returns the next one."""

    count: float = 0.0  # that have ended
    seconds: float = 0.0  # that these lasted
    begun_s: float | None = None  # when the newest began, while it may go on,
    seen_s: float = 0.0  # ... and when it was last seen

    def seen(self, phase: Phase, now_s: float) -> "Bursts":
        """With the phase at this look."""
        known = self
        if self.begun_s is not None and now_s - self.seen_s > APART_S:
            keep = 1.0 - 1.0 / MEMORY
            known = Bursts(keep * self.count + 1.0, keep * self.seconds + self.seen_s - self.begun_s)
        if not phase.is_burst:
            return known
        begun_s = now_s - phase.seconds if known.begun_s is None else known.begun_s
        return Bursts(known.count, known.seconds, begun_s, now_s)

    def lasts_s(self, phase: Phase, least_s: float) -> float:
        """Seconds after which 1/e of the difference to the long run is left. `least_s`: that the phase counts as."""
        held_s = max(least_s, phase.seconds)
        if not phase.is_burst:
            return LASTS * held_s
        return (self.seconds + held_s) / (self.count + 1.0 / LASTS)
