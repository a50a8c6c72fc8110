"""How late first tokens are: the wait by chance behind others, the 99th percentile, and the share beyond the limit."""

from math import log

import numpy as np

from pengserve.planners.columns import Floats
from pengserve.planners.judge.rows import Rows
from pengserve.planners.judge.step_rates import Steps, first_token_s

TAIL, TAIL_DEVIATIONS = 0.01, 2.33  # share of requests beyond that percentile; standard deviations to it


def behind(rows: Rows, rate: Floats, steps: Steps) -> tuple[Floats, Floats]:
    """How likely a prompt waits behind others that came by chance at the same time, and how long it then does.

    Prompts of a group are read one after the other; of k groups the one with the least to do is chosen (Sakasegawa).
    """
    share = np.minimum(0.95, rate * rows.prompt_tokens / steps.rate)
    chance = share ** (np.sqrt(2.0 * (rows.routes + 1.0)) - 1.0) * share
    # Of the prompt that one meets: long ones are met more often, and half of it is read already.
    return chance, rows.pairs / steps.rate / (2.0 * rows.routes * (1.0 - share))


def tail_of(
    rows: Rows,
    steps: Steps,
    prompt: Floats,
    alone_s: Floats,
    chance: Floats,
    longest_s: Floats,
    standing_s: Floats,
) -> Floats:
    """The 99th percentile of TTFT: of a long prompt that waits for none, or of a usual one that waits long by chance,
    as far as it waits longer than the queue that stands.
    """
    longest = prompt * np.exp(rows.spread * (TAIL_DEVIATIONS - 0.5 * rows.spread))
    of_long_s = first_token_s(rows, steps, longest + rows.mates * rows.prompt_tokens)
    by_chance_s = longest_s * np.log(np.maximum(1.0, chance / TAIL))
    # How many come together is about exponentially distributed: most in a hundred are `log(1 / TAIL)` times the mean.
    of_mates_s = (log(1.0 / TAIL) - 1.0) * rows.mates * prompt / steps.rate
    of_waiting_s = alone_s + np.maximum(0.0, np.maximum(by_chance_s, of_mates_s) - standing_s)
    found: Floats = np.maximum(of_long_s, of_waiting_s)
    return found


def late_share(rows: Rows, alone_s: Floats, queue_s: Floats, chance: Floats, longest_s: Floats) -> Floats:
    """Share of requests whose first token comes beyond the limit: long ones, and those that wait behind long ones."""
    slack_s = np.maximum(1e-3, rows.ttft_limit_s - queue_s)
    long = share_above(alone_s * np.exp(-0.5 * rows.spread**2), slack_s, rows.spread)
    waiting = chance * np.exp(-np.maximum(0.0, slack_s - alone_s) / np.maximum(1e-6, longest_s * rows.routes))
    late: Floats = np.minimum(1.0, long + waiting)
    return late


def share_above(median: Floats, limit: Floats, spread: Floats | float) -> Floats:
    """Share of what is spread around `median`, as a normal distribution of logarithms, that is above `limit`."""
    distance = np.log(np.maximum(1e-9, limit) / np.maximum(1e-9, median)) / np.maximum(0.05, spread)
    share: Floats = 1.0 / (1.0 + np.exp(np.minimum(np.maximum(1.702 * distance, -50.0), 50.0)))
    return share
