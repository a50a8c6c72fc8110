"""Requests that run, by when they began: those that began together grow alike, and end together if lengths are alike.

So a burst needs more memory at once than as many requests that came one after the other, and needs it later.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pengserve.planners.columns import Floats, Ints
from pengserve.planners.types.ages import NUM_AGES

COHORTS = NUM_AGES  # of those that run now, of as many requests each
LEAST_SPREAD = 0.05  # of lengths, as a share of the mean
SPREAD_BELIEF = 1.0  # batches of answers that a spread as wide as the mean counts as


class Lengths(NamedTuple):
    """Lengths of answers: `sure` tokens, and a rest that is exponentially distributed around `rest`, in tokens.

    With the mean and the spread of what was seen; a spread beyond the mean counts as the mean.
    """

    sure: Floats
    rest: Floats

    @classmethod
    def of(cls, mean: Floats, spread: Floats) -> "Lengths":
        """`spread`: the standard deviation as a share of the mean."""
        rest = np.clip(spread, LEAST_SPREAD, 1.0) * mean
        return cls(mean - rest, rest)

    @property
    def mean_age(self) -> Floats:
        """Tokens that those have which are under way at any one time, in the mean, where requests come evenly."""
        mean = self.sure + self.rest
        return (mean * mean + self.rest * self.rest) / (2.0 * mean)

    def after(self, age: Floats) -> "Lengths":
        """Of what is still to come after so many tokens."""
        return Lengths(np.maximum(0.0, self.sure - age), self.rest)

    def begun(self, num_steps: Floats) -> tuple[Floats, Floats]:
        """Of those that begin evenly during so many tokens: the share that runs at the end, and in the mean."""
        sure = np.minimum(self.sure, num_steps)
        left = num_steps - sure
        ended = -self.rest * np.expm1(-left / self.rest)
        area = sure * (num_steps - 0.5 * sure) + self.rest * (left - ended)
        return (sure + ended) / num_steps, area / (num_steps * num_steps)


def ages_of(running: Ints, ages: Ints) -> tuple[float, ...]:
    """Ages of all requests that run, in `COHORTS` cohorts of as many; the youngest first, in tokens.

    Args:
        running: `[instance]`, requests; one at least.
        ages: `[cohort, instance]`, tokens.
    """
    tokens, counts = ages.ravel(), np.broadcast_to(running, ages.shape).ravel()
    order = np.argsort(tokens, kind="stable")
    upto = np.cumsum(counts[order])
    places = np.searchsorted(upto, (np.arange(COHORTS) + 0.5) / COHORTS * upto[-1])
    found: list[float] = tokens[order][places].astype(np.float64).tolist()
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of prompts that came, or of answers that ended, of late: what their spread is estimated from (one-way
    analysis of variance).

    Of those at one instance between two looks the count and the sum of tokens are known.
    """

    batches: float = 0.0
    count: float = 0.0  # in all batches
    tokens: float = 0.0
    squares: float = 0.0  # of the tokens of a batch, by its count

    def seen(self, counts: Ints, tokens: Ints, keep: float) -> "Sizes":
        """With what each instance has added; what was known before counts `keep`."""
        is_some = counts > 0
        if not is_some.any():
            return self
        count, total = counts[is_some].astype(np.float64), tokens[is_some].astype(np.float64)
        return Sizes(
            keep * self.batches + len(count),
            keep * self.count + float(count.sum()),
            keep * self.tokens + float(total.sum()),
            keep * self.squares + float((total * total / count).sum()),
        )

    @property
    def spread(self) -> float:
        """Standard deviation of the tokens of one as a share of the mean; 1 where few were seen."""
        if not self.count or not self.tokens:
            return 1.0
        mean = self.tokens / self.count
        within = max(0.0, self.squares - self.tokens * mean) + SPREAD_BELIEF * mean * mean
        return float(np.sqrt(within / max(SPREAD_BELIEF, self.batches - 1.0 + SPREAD_BELIEF))) / mean

    @property
    def of_a_token(self) -> float:
        """Tokens that the one has to which a token belongs, in the mean: no more than that, as batches are means."""
        return self.squares / self.tokens if self.tokens else 0.0


def _sum(cohorts: Floats) -> Floats:
    """Of all cohorts, by row; as `sum`, which takes twice as long for few."""
    found: Floats = np.add.reduce(cohorts, axis=0)
    return found


def _dot(cohorts: Floats, others: Floats) -> Floats:
    """The products of all cohorts, added up by row."""
    found: Floats = np.einsum("cr,cr->r", cohorts, others)
    return found


class Later(NamedTuple):
    """What becomes of cohorts within some tokens."""

    counts: Floats  # [cohort, row]: at the end
    running: Floats  # ... of all
    mean: Floats  # that run meanwhile
    held_tokens: Floats  # KV at the end


class Outlook:
    """Cohorts as they are now, to be asked again and again what will become of them."""

    def __init__(self, counts: Floats, sure: Floats, sizes: Floats, rest: Floats) -> None:
        """`[cohort, row]`.

        Args:
            sure: tokens that each will surely have.
            sizes: of the KV of each.
            rest: mean of the tokens that come after those.
        """
        self._counts, self._sure, self._sizes, self._rest = counts, sure, sizes, rest
        self._running, self._by_rest = _sum(counts), -1.0 / rest

    def after(self, num_steps: Floats) -> Later:
        """What becomes of them within so many tokens."""
        sure = np.minimum(self._sure, num_steps)
        counts = np.subtract(num_steps, sure)  # ... and what is left of these, in place: such arrays are large
        counts *= self._by_rest
        np.exp(counts, out=counts)
        counts *= self._counts
        running = _sum(counts)
        mean = (_dot(self._counts, sure) + self._rest * (self._running - running)) / num_steps
        return Later(counts, running, mean, _dot(counts, self._sizes) + num_steps * running)


class Cohorts:
    """Requests that run, `[cohort, row]`, the oldest first; and their KV.

    There is room for as many more as will begin, so that nothing is copied when they do.
    """

    def __init__(self, running: Floats, held_tokens: Floats, ages: Floats, lengths: Lengths, num_more: int) -> None:
        """`ages` is `[row, cohort]`."""
        self._num = num = ages.shape[1]
        self._lengths = lengths
        self._counts, self._ages, self._sizes = np.empty((3, num + num_more, len(running)))
        self._counts[:num] = running / num
        self._ages[:num] = ages.T[::-1]
        each = held_tokens / np.maximum(running, 1e-9)
        base = np.maximum(1.0, each - self._ages[:num].mean(axis=0))  # tokens before the answer
        self._sizes[:num] = base + self._ages[:num]

    def outlook(self) -> Outlook:
        """Of those that run now."""
        num = self._num
        sure, rest = self._lengths.after(self._ages[:num])
        return Outlook(self._counts[:num], sure, self._sizes[:num], rest)

    def move(self, later: Later, num_steps: Floats, new: Floats, read: Floats, done: Floats) -> Floats:
        """They become that, and `new` ones run that began meanwhile; the KV of all.

        `read`: tokens of each of the new ones that were read, of which those `done` belong to their answers.
        """
        grown, num = np.minimum(0.5 * num_steps, self._lengths.after(done).mean_age), self._num
        size = read + grown
        self._counts[:num] = later.counts
        self._ages[:num] += num_steps
        self._sizes[:num] += num_steps
        self._counts[num], self._ages[num], self._sizes[num] = new, done + grown, size
        self._num += 1
        held: Floats = later.held_tokens + new * size
        return held

    def preempt(self, excess_tokens: Floats) -> tuple[Floats, Floats]:
        """The newest lose their KV, as far as there is too much: how many requests, and tokens of their answers."""
        counts, sizes = self._counts[: self._num], self._sizes[: self._num]
        held = counts * sizes
        newer = np.cumsum(held[::-1], axis=0)[::-1] - held
        lost = np.clip(excess_tokens - newer, 0.0, held) / sizes
        counts -= lost
        return lost.sum(axis=0), (lost * self._ages[: self._num]).sum(axis=0)
