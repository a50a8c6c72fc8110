"""What happens to requests in each slice of time: they are read and decoded, end, and lose their KV.

Nothing of what it costs is needed for that, so costs are computed of all slices at once (`judge.fluid`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pengserve.planners.columns import Bools, Floats
from pengserve.planners.judge.cohorts import Cohorts, Lengths
from pengserve.planners.judge.rows import Rows
from pengserve.planners.judge.step_rates import StepRates, Steps

SLICES = 12  # of the horizon; the later ones are longer
GROWTH = 1.15  # of a slice over the one before
ATTEMPTS, NEAR = 3, 0.1  # to find how many steps fit into a slice; a share of them by which they may be wrong
RESERVE = 0.25  # of its answer, that a request must find room for before it is read: those that run grow meanwhile


class Slice(NamedTuple):
    """One slice of time, `[row]`; or all of them, `[slice, row]`."""

    rate: Floats  # requests that come by second
    before: Floats  # requests that wait at its beginning,
    waiting: Floats  # ... and at its end
    again: Floats  # of those that wait at its beginning: they had their first token before they were preempted,
    resumed: Floats  # ... and of these, those that go on,
    away_s: Floats  # ... after so many request-seconds
    standing: Floats  # tokens of prompts that wait at its end
    prompt: Floats  # tokens of one that waits
    new: Floats  # requests that begin,
    ended: Floats  # ... and that end
    running: Floats  # requests that run at its beginning,
    middle: Floats  # ... and in the mean of its steps
    live_s: Floats  # in which there are steps
    num_steps: Floats  # tokens that each of those that run has
    is_full: Bools  # memory alone keeps prompts from being read, or takes KV from those that run
    steps: Steps  # at the batch of the middle

    @classmethod
    def joined(cls, parts: "Sequence[Slice]") -> "Slice":
        """All of `parts`, one after the other."""
        *columns, all_steps = zip(*parts, strict=True)
        together: list[Any] = [np.array(column) for column in columns]
        together.append(Steps(*(np.array(column) for column in zip(*all_steps, strict=True))))
        return cls(*together)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """All slices of time, and what is left at their end."""

    length_s: Floats  # `[slice, 1]`, or `[slice, row]` of rows with a horizon each
    slices: Slice
    steps: Steps  # of the last one
    waiting: Floats  # requests,
    again: Floats  # ... of which these had their first token,
    away_s: Floats  # ... and have waited so many request-seconds since
    running: Floats
    recomputed_tokens: Floats


def slices(horizon_s: Floats | float) -> Floats:
    """Seconds of each slice of time: `[slice]`, or `[slice, row]` of rows with a horizon each."""
    lengths = GROWTH ** np.arange(SLICES)
    found: Floats = np.multiply.outer(lengths, horizon_s) / lengths.sum()
    return found


def bursts(burst_s: Floats, horizon_s: Floats | float) -> Floats:
    """How much of a burst is left in each slice, in the mean: `[slice, row]`."""
    lengths = slices(horizon_s).reshape(SLICES, -1)
    ends = np.cumsum(lengths, axis=0)
    found: Floats = burst_s * (np.exp((lengths - ends) / burst_s) - np.exp(-ends / burst_s)) / lengths
    return found


def course_of(rows: Rows, horizon_s: Floats | float, rates: StepRates) -> Course:
    """The course of each row within `horizon_s`, which may differ from row to row. `rates`: of the same rows."""
    kv, prompt, output = rows.kv_tokens, rows.prompt_tokens, rows.output_tokens
    lengths = Lengths.of(output, rows.output_spread)
    running, waiting, waiting_tokens = rows.running, rows.waiting, rows.waiting_tokens
    stall, usual, least_steps = rows.stall_s, prompt + lengths.mean_age, 1e-4 * lengths.rest
    cohorts, held = Cohorts(running, rows.held_tokens, rows.ages, lengths, SLICES), rows.held_tokens
    again, done = rows.again, rows.again_tokens  # are the first to be read
    recomputed = away_s = zero = np.zeros_like(kv)
    each = np.where(running > 0, held / np.maximum(running, 1e-9), usual)
    steps = rates.of(running, each, prompt)
    found = list[Slice]()
    for length, burst in zip(slices(horizon_s), bursts(rows.burst_s, horizon_s), strict=True):
        # Arrivals.
        rate = rows.later_rate + burst * (rows.rate - rows.later_rate)
        came, before = rate * length, waiting
        waiting, waiting_tokens = waiting + came, waiting_tokens + came * prompt
        live = np.maximum(0.0, length - stall)
        stall = np.maximum(0.0, stall - length)
        many_waiting = np.maximum(waiting, 1e-9)
        mean = np.maximum(1.0, waiting_tokens / many_waiting)
        # Read, as far as there are memory, slots and time; a request will need more memory than its prompt.
        had = done / many_waiting  # of its answer
        to_come, grown, outlook = lengths.after(had), 1.0 + RESERVE * output / mean, cohorts.outlook()
        at, num_steps = running, live / steps.decode_s
        many, too_many = num_steps, zero
        for attempt in range(ATTEMPTS):  # from the second one on at the batch of the middle of this slice
            steps, taken = rates.of(at, each, mean), np.maximum(num_steps, least_steps)
            later, (still, meanwhile) = outlook.after(taken), to_come.begun(taken)
            by_memory = np.maximum(0.0, kv - later.held_tokens) / (grown * still)
            by_slots = np.maximum(0.0, rows.slots - later.running) * mean / still
            most = np.minimum(np.minimum(waiting_tokens, by_slots), steps.rate * live)  # but for memory
            read = np.minimum(by_memory, most)
            busy, new = np.minimum(live, read / steps.rate), read / mean
            fit = busy / steps.full_s + (live - busy) / steps.decode_s
            middle = later.mean + new * meanwhile
            if attempt + 1 == ATTEMPTS:
                break
            missing = fit - num_steps
            if attempt == 0:
                at, num_steps, too_many = middle, np.minimum(num_steps, fit), np.maximum(0.0, -missing)
                continue
            is_near = np.abs(missing) <= NEAR * fit
            if is_near.all():
                break
            # More steps end more requests; with their memory more is read, and fewer steps fit. Where many end at
            # once, what fits would lead to and fro: the truth is between too many and too few.
            is_few = missing > 0.0
            between = num_steps + (many - num_steps) * missing / np.maximum(1e-9, missing + too_many)
            many, too_many = np.where(is_few, many, num_steps), np.where(is_few, too_many, -missing)
            # A row that is near stays as it is, so that what is predicted of it does not depend on the other rows.
            at = np.where(is_near, at, middle)
            num_steps = np.where(is_near, num_steps, np.where(is_few, between, fit))
        began, stays = running, new * still
        running = later.running + stays
        ended = np.maximum(0.0, began + new - running)
        waiting_tokens, waiting = waiting_tokens - read, np.maximum(0.0, waiting - new)
        resumed = np.minimum(again, new)
        away_s = away_s + (again - 0.5 * resumed) * length
        back_s = away_s * (resumed / np.maximum(again, 1e-9))
        # Preempted, where those that run have grown beyond the memory.
        held, done = cohorts.move(later, taken, stays, mean, had), np.maximum(0.0, done - new * had)
        is_beyond = held > kv
        is_full, standing = is_beyond | (by_memory < most), np.maximum(0.0, waiting_tokens)
        queue = before, waiting, again, resumed, back_s, standing, mean
        found.append(Slice(rate, *queue, new, ended, began, middle, live, taken, is_full, steps))
        again, away_s = again - resumed, away_s - back_s
        if is_beyond.any():
            excess = np.maximum(0.0, held - kv)
            lost, their = cohorts.preempt(excess)
            running, held, done = running - lost, held - excess, done + their
            waiting, waiting_tokens, recomputed = waiting + lost, waiting_tokens + excess, recomputed + excess
            again = again + lost
        each = np.where(running > 1e-9, held / np.maximum(running, 1e-9), usual)
    return Course(
        length_s=slices(horizon_s).reshape(SLICES, -1),
        slices=Slice.joined(found),
        steps=steps,
        waiting=waiting,
        again=again,
        away_s=away_s,
        running=running,
        recomputed_tokens=recomputed,
    )
