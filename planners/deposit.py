"""Tokens that are computed and not yet due: how deep a stream's token deposit is (OrbitFlow section 3.2).

With steady pacing one token goes to the client in each interval while there are more; where there is none, the next one
goes as soon as it is computed, and the intervals count on from there:

    due(i) = max(computed(i), due(i - 1) + interval)

So when a token is due follows from when tokens were computed, and both the ingress, which releases them, and the
instance, which may pause a stream that has a deposit, compute it by themselves. No message says it.
"""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True)
class Deposit:
    """The deposit of one stream. Times are of one monotonic clock, in seconds; an interval of 0 paces nothing."""

    interval_s: float
    first_due_s: float | None = None  # of the first token; None: there was none
    due_s: float = 0.0  # of the newest token

    def add(self, num_tokens: int, now_s: float) -> Iterator[float]:
        """Tokens were computed: when each is due. The iterator must be used up."""
        for _ in range(num_tokens):
            if self.first_due_s is None:
                self.first_due_s = self.due_s = now_s
            else:
                self.due_s = max(now_s, self.due_s + self.interval_s)
            yield self.due_s

    def depth(self, now_s: float) -> int:
        """Tokens that are computed and not due yet."""
        left_s = self.due_s - now_s
        if self.interval_s <= 0 or left_s <= 0 or self.first_due_s is None:
            return 0
        return -int(-left_s // self.interval_s)

    def slack_s(self, now_s: float) -> float:
        """How long the next token may take until the client notices; negative where that is over.

        Before the first token there is none: its time is the TTFT's matter.
        """
        if self.first_due_s is None:
            return 0.0
        return self.due_s + self.interval_s - now_s
