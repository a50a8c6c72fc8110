"""When an instance tells its load with a step's tokens: at once where requests came, went or ended; else now and then.

To add the load up, to encode it and to read it took 1 % of a small model's step. Nothing reads it as often as that:
ingresses dispatch by it, and controllers look at it some times a second.
"""

import time
from collections.abc import Callable, Hashable

EVERY_S = 0.01


class LoadNews:
    """Belongs to the step thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: Hashable = None
        self._told_s = -EVERY_S
        self.num_untold = 0  # steps since the load was last told

    def is_due(self, what: Hashable) -> bool:
        """Whether a step's load is to be told; the caller does so then.

        `what` differs from the last step's where anything but the tokens of running requests has changed.
        """
        now_s = self._clock()
        if what == self._told and now_s - self._told_s < EVERY_S:
            self.num_untold += 1
            return False
        self._told, self._told_s, self.num_untold = what, now_s, 0
        return True
