"""The groups that the fluid model predicts, as they are and as they would be, in columns."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.columns import A, Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Groups to predict, an entry each. Rates are by second, KV is in tokens."""

    servers: Floats
    cost: Floats  # [row, term]: of one server's step, in the order of `StepCost.terms`
    kv_tokens: Floats
    slots: Floats  # requests that may run, of all servers together
    step_tokens: Floats  # new tokens of a full step
    mates: Floats  # requests that come at the same instant as one that comes
    running: Floats
    held_tokens: Floats  # of running requests
    waiting: Floats
    waiting_tokens: Floats
    again: Floats  # of those that wait: they had begun to answer before they were preempted,
    again_tokens: Floats  # ... and the tokens that they had
    stall_s: Floats  # from now on, in which nothing runs
    rate: Floats  # requests that come now,
    later_rate: Floats  # ... and in the long run: a burst ends
    burst_s: Floats  # after which 1/e of it is left
    prompt_tokens: Floats
    read_share: Floats  # of a prompt, that is computed and not found in a prefix cache
    output_tokens: Floats
    output_spread: Floats  # standard deviation of answers, as a share of the mean
    ages: Floats  # [row, cohort]: tokens that running requests have generated, in `COHORTS` groups of as many
    pairs: Floats  # that a token of a prompt adds to a step (`StepCost.pair_s`): the mean square over the mean prompt
    spread: Floats  # of prompts: the standard deviation of their logarithm
    ttft_limit_s: Floats
    tpot_limit_s: Floats
    miss_s: Floats  # request-seconds that one costs which is beyond a limit
    routes: Floats  # groups of the whole layout that requests are sent to, this one among them

    @classmethod
    def joined(cls, parts: "Sequence[Rows]") -> "Rows":
        """All rows of `parts`, in their order: to predict them together takes hardly longer than a part alone."""
        return cls(**{f.name: np.concatenate([getattr(rows, f.name) for rows in parts]) for f in fields(cls)})

    def at(self, places: Sequence[int]) -> "Rows":
        """Those of these places."""
        return Rows(**{f.name: getattr(self, f.name)[list(places)] for f in fields(self)})


class RowSets:
    """Sets of rows, to be added up or compared for all sets at once: such as the rows of each change of a look."""

    def __init__(self, sets: Sequence[Sequence[int]]) -> None:
        """No set is empty."""
        sizes = [len(rows) for rows in sets]
        self._rows = np.fromiter(chain.from_iterable(sets), dtype=np.int64, count=sum(sizes))
        self._begins = np.cumsum([0, *sizes[:-1]])

    def sum(self, values: NDArray[A]) -> NDArray[A]:
        """`[..., set]` of `[..., row]`."""
        found: NDArray[A] = np.add.reduceat(values[..., self._rows], self._begins, axis=-1)
        return found

    def least(self, values: Floats) -> Floats:
        """`[..., set]` of `[..., row]`."""
        found: Floats = np.minimum.reduceat(values[..., self._rows], self._begins, axis=-1)
        return found

    def most(self, values: Floats) -> Floats:
        """`[..., set]` of `[..., row]`."""
        found: Floats = np.maximum.reduceat(values[..., self._rows], self._begins, axis=-1)
        return found
