"""How late first tokens are: the wait by chance behind others, the 99th percentile, and the share beyond the limit."""

from math import log
from typing import NamedTuple

import numpy as np

from pengserve.planners.columns import Floats
from pengserve.planners.judge.rows import Rows
from pengserve.planners.judge.step_rates import StepRates, Steps

TAIL, TAIL_DEVIATIONS = 0.01, 2.33  # share of requests beyond that percentile; standard deviations to it


class Behind(NamedTuple):
    """Others that came by chance at the same time, and are in the way of a prompt."""

    chance: Floats  # that there are any
    longest_s: Floats  # ... and how long they take then


class Tails:
    """Made once for all slices of time: what does not change from slice to slice is computed here."""

    def __init__(self, rows: Rows, rates: StepRates) -> None:
        self._rows, self._rates = rows, rates
        self._servers_power = np.sqrt(2.0 * (rows.routes + 1.0))
        self._most_routes = 2.0 * rows.routes
        self._longest = np.exp(rows.spread * (TAIL_DEVIATIONS - 0.5 * rows.spread))  # of a mean prompt, a long one
        self._usual = np.exp(-0.5 * rows.spread**2)  # ... the median
        self._mates_tokens = rows.mates * rows.prompt_tokens
        # How many come together is about exponentially distributed: most in a hundred are `log(1 / TAIL)` times the
        # mean.
        self._more_mates = (log(1.0 / TAIL) - 1.0) * rows.mates

    def behind(self, rate: Floats, steps: Steps) -> Behind:
        """How likely a prompt waits behind others that came by chance at the same time, and how long it then does.

        Prompts of a group are read one after the other; of k groups the one with the least to do is chosen
        (Sakasegawa).
        """
        rows = self._rows
        share = np.minimum(0.95, rate * rows.prompt_tokens / steps.rate)
        # Of the prompt that one meets: long ones are met more often, and half of it is read already.
        return Behind(share**self._servers_power, rows.pairs / (steps.rate * self._most_routes * (1.0 - share)))

    def tail_of(self, steps: Steps, prompt: Floats, alone_s: Floats, behind: Behind, standing_s: Floats) -> Floats:
        """The 99th percentile of TTFT: of a long prompt that waits for none, or of a usual one that waits long by
        chance, as far as it waits longer than the queue that stands.
        """
        of_long_s = self._rates.first_token_s(steps, prompt * self._longest + self._mates_tokens)
        by_chance_s = behind.longest_s * np.log(np.maximum(1.0, behind.chance / TAIL))
        of_mates_s = self._more_mates * prompt / steps.rate
        of_waiting_s = alone_s + np.maximum(0.0, np.maximum(by_chance_s, of_mates_s) - standing_s)
        found: Floats = np.maximum(of_long_s, of_waiting_s)
        return found

    def late_share(self, alone_s: Floats, queue_s: Floats, behind: Behind) -> Floats:
        """Share of requests whose first token is beyond the limit: long ones, and those that wait behind long ones."""
        rows = self._rows
        slack_s = np.maximum(1e-3, rows.ttft_limit_s - queue_s)
        long = share_above(alone_s * self._usual, slack_s, rows.spread)
        late_s = np.maximum(0.0, slack_s - alone_s)
        waiting = behind.chance * np.exp(-late_s / np.maximum(1e-6, behind.longest_s * rows.routes))
        late: Floats = np.minimum(1.0, long + waiting)
        return late


def share_above(median: Floats, limit: Floats, spread: Floats | float) -> Floats:
    """Share of what is spread around `median`, as a normal distribution of logarithms, that is above `limit`."""
    distance = np.log(np.maximum(1e-9, limit) / np.maximum(1e-9, median)) / np.maximum(0.05, spread)
    share: Floats = 1.0 / (1.0 + np.exp(np.minimum(np.maximum(1.702 * distance, -50.0), 50.0)))
    return share
