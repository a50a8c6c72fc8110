"""What will become of groups of instances within a horizon: requests as a fluid that is read, decoded, and ends.

A row is one group, now or as it would be. `servers` of it compute side by side: one where it is alone or
tensor-parallel, one for each stage of a pipeline, in which so many microbatches are under way. In each slice of time:

    read        waiting prompts are read, as fast as full steps are, as far as KV and slots are free
    decoded     running requests have a token of each of these steps, and of the steps in the rest of the time
    ended       requests end as lengths of answers say (`judge.cohorts`), and free their KV
    preempted   where KV has grown beyond what there is, requests lose theirs, and wait to be computed again

The currency is request-seconds: one for each second of a request that runs, `WAIT_WEIGHT` for each second of one that
waits to be read, and `miss_s` for a request that misses its limits. From then on each request counts with the 99th
percentile of TTFT (`judge.tails`), as much for a second as one that waits, and more where that is near its limit and no
queue stands: users judge a service by its tail. What is left at the end counts as long as it will take. So queues,
TTFT, TPOT, computing again and stalls add up in one unit, and a layout that serves the same with fewer requests in
flight is better (Little's law).
"""

from dataclasses import dataclass

import numpy as np

from pengserve.planners.columns import Floats
from pengserve.planners.judge.cohorts import Cohorts, Lengths
from pengserve.planners.judge.rows import Rows
from pengserve.planners.judge.step_rates import first_token_s, steps_of
from pengserve.planners.judge.tails import behind, late_share, share_above, tail_of

WAIT_WEIGHT = 16.0  # request-seconds of a second without a first token
TAIL_MISS = 0.2  # of what a miss costs: for each request, where the 99th percentile of TTFT is at its limit
MOST_BEYOND = 3.0  # limits: a later tail counts as this one, for what is late counts as missed besides
SLICES = 12  # of the horizon; the later ones are longer
GROWTH = 1.15  # of a slice over the one before
ATTEMPTS, NEAR = 3, 0.1  # to find how many steps fit into a slice; a share of them by which they may be wrong
TPOT_SPREAD = 0.15  # of the logarithm of requests' TPOT around the mean
RESERVE = 0.25  # of its answer, that a request must find room for before it is read: those that run grow meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of each row."""

    cost_s: Floats  # request-seconds, see above
    ttft_s: Floats  # mean of those that begin; those that still wait at the end count with their wait until then
    tail_s: Floats  # P99 of the TTFT of those that begin, but for queues that stand
    tpot_s: Floats  # mean
    queue: Floats  # requests that wait at the end
    running: Floats  # ... and that run
    finished: Floats  # requests
    recomputed_tokens: Floats
    missed: Floats  # requests beyond a limit
    read_share: Floats  # of the time that reading prompts takes at the rate at which they come
    request_s: Floats  # of all that wait and run within the horizon, alike
    full_s: Floats  # seconds in which memory alone keeps prompts from being read, or takes KV from those that run


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


def mean_rate(rows: Rows, horizon_s: Floats | float) -> Floats:
    """Requests that come by second, in the mean over the horizon."""
    share = rows.burst_s / horizon_s * (1.0 - np.exp(-horizon_s / rows.burst_s))
    found: Floats = rows.later_rate + share * (rows.rate - rows.later_rate)
    return found


def predict(rows: Rows, horizon_s: Floats | float) -> Fate:
    """The fate of each row within `horizon_s`, which may differ from row to row."""
    kv, prompt, output = rows.kv_tokens, rows.prompt_tokens, rows.output_tokens
    lengths = Lengths.of(output, rows.output_spread)
    running, waiting, waiting_tokens = rows.running.copy(), rows.waiting.copy(), rows.waiting_tokens.copy()
    stall, usual = rows.stall_s.copy(), prompt + lengths.mean_age
    cohorts, held = Cohorts(running, rows.held_tokens, rows.ages, lengths), rows.held_tokens
    zero = np.zeros_like(kv)
    done = zero  # tokens of answers, of those that wait: they were preempted
    wait_s, run_s, read_s, begun, finished, decoded, recomputed, late, slow, tail_s, near, full_s = (
        zero.copy() for _ in range(12)
    )
    each = np.where(running > 0, held / np.maximum(running, 1e-9), usual)
    steps = steps_of(rows, running, each, prompt)
    for length, burst in zip(slices(horizon_s), bursts(rows.burst_s, horizon_s), strict=True):
        # Arrivals.
        rate = rows.later_rate + burst * (rows.rate - rows.later_rate)
        came, before = rate * length, waiting
        waiting, waiting_tokens = waiting + came, waiting_tokens + came * prompt
        live = np.maximum(0.0, length - stall)
        stall = np.maximum(0.0, stall - length)
        mean = np.maximum(1.0, waiting_tokens / np.maximum(waiting, 1e-9))
        # Read, as far as there are memory, slots and time; a request will need more memory than its prompt.
        had = done / np.maximum(waiting, 1e-9)  # of its answer
        to_come, grown = lengths.after(had), 1.0 + RESERVE * output / mean
        at, num_steps, to_read = running, live / steps.decode_s, waiting_tokens
        many, too_many = num_steps, zero
        for attempt in range(ATTEMPTS):  # from the second one on at the batch of the middle of this slice
            steps, taken = steps_of(rows, at, each, mean), np.maximum(num_steps, 1e-4 * lengths.rest)
            later, (still, meanwhile) = cohorts.after(taken), to_come.begun(taken)
            by_memory = np.maximum(0.0, kv - later.held_tokens) / (grown * still)
            by_slots = np.maximum(0.0, rows.slots - later.running) * mean / still
            read = np.minimum(np.minimum(to_read, np.minimum(by_memory, by_slots)), steps.rate * live)
            busy, new = np.minimum(live, read / steps.rate), read / mean
            fit = busy / steps.full_s + (live - busy) / steps.decode_s
            middle, missing = later.mean + new * meanwhile, fit - num_steps
            is_near = (np.abs(missing) <= NEAR * fit) & (attempt > 0)
            if is_near.all():
                break
            # More steps end more requests; with their memory more is read, and fewer steps fit. Where many end at
            # once, what fits would lead to and fro: the truth is between too many and too few.
            is_few = missing > 0.0
            between = num_steps + (many - num_steps) * missing / np.maximum(1e-9, missing + too_many)
            many, too_many = np.where(is_few, many, num_steps), np.where(is_few, too_many, -missing)
            # A row that is near stays as it is, so that what is predicted of it does not depend on the other rows.
            at, num_steps = np.where(is_near, (at, num_steps), (middle, np.where(is_few, between, fit)))
        end = later.running + new * still
        ended = np.maximum(0.0, running + new - end)
        chance, longest_s = behind(rows, rate, steps)
        alone_s = first_token_s(rows, steps, mean + rows.mates * prompt)  # those that come together are read together
        read_s += new * (alone_s + chance * longest_s)
        standing_s = np.maximum(0.0, to_read - read) / steps.rate  # this queue counts by itself
        last_s = new * tail_of(rows, steps, mean, alone_s, chance, longest_s, standing_s)
        tail_s += last_s
        beyond = np.minimum(MOST_BEYOND * new, last_s / rows.ttft_limit_s)
        near += beyond * np.maximum(0.0, 1.0 - standing_s / rows.ttft_limit_s)
        queue_s = np.minimum(horizon_s, np.maximum(0.0, waiting - new) * length / np.maximum(new, 1e-9))
        late += new * late_share(rows, alone_s, queue_s, chance, longest_s)
        slow_share = share_above(live / taken, rows.tpot_limit_s, TPOT_SPREAD)
        slow += ended * np.where(live > 0, slow_share, 0.0)
        waiting_tokens, waiting = waiting_tokens - read, np.maximum(0.0, waiting - new)
        wait_s += 0.5 * (before + waiting) * length
        run_s += middle * live + running * (length - live)
        decoded += middle * taken
        # Preempted, where those that run have grown beyond the memory.
        held, done = cohorts.move(later, taken, new * still, mean, had), np.maximum(0.0, done - new * had)
        excess, running = np.maximum(0.0, held - kv), end
        full_s += length * ((excess > 0.0) | (by_memory < np.minimum(np.minimum(by_slots, to_read), steps.rate * live)))
        if excess.any():
            lost, their = cohorts.preempt(excess)
            running, held, done = end - lost, held - excess, done + their
            waiting, waiting_tokens, recomputed = waiting + lost, waiting_tokens + excess, recomputed + excess
        each = np.where(running > 1e-9, held / np.maximum(running, 1e-9), usual)
        begun, finished = begun + new, finished + ended
    # What is left takes as long as a full group needs for it: a queue its square over twice the rate.
    most = np.minimum(rows.slots, kv / usual)
    full = steps_of(rows, most, usual, prompt)
    per_s = 1.0 / (prompt / steps.rate + output * full.decode_s / np.maximum(1.0, most))
    # Tokens of what waits come among others' prompts, as `most` running and `per_s` that end say (Little). Tokens of
    # what runs count at the speed of decoding alone: else a layout whose memory lets more run would pay for that twice.
    left_s = WAIT_WEIGHT * waiting * waiting / (2.0 * per_s) + waiting * most / per_s
    left_s = left_s + running * output * steps.decode_s * 0.5
    late += np.maximum(0.0, waiting - per_s * rows.ttft_limit_s)
    slow += running * share_above(steps.decode_s, rows.tpot_limit_s, TPOT_SPREAD)
    missed = late + slow * (1.0 - late / np.maximum(begun + waiting, late + 1e-9))
    return Fate(
        cost_s=WAIT_WEIGHT * (wait_s + tail_s) + run_s + left_s + rows.miss_s * (missed + TAIL_MISS * near),
        ttft_s=(wait_s + read_s) / np.maximum(begun + waiting, 1e-9),
        tail_s=tail_s / np.maximum(begun, 1e-9),
        tpot_s=run_s / np.maximum(decoded, 1e-9),
        queue=waiting,
        running=running,
        finished=finished,
        recomputed_tokens=recomputed,
        missed=missed,
        read_share=mean_rate(rows, horizon_s) * prompt / steps.rate,
        request_s=wait_s + read_s + run_s,
        full_s=full_s,
    )
