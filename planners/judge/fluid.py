"""What will become of groups of instances within a horizon: requests as a fluid that is read, decoded, and ends.

A row is one group, now or as it would be. `servers` of it compute side by side: one where it is alone or
tensor-parallel, one for each stage of a pipeline, in which so many microbatches are under way. In each slice of time
(`judge.course`):

    read        waiting prompts are read, as fast as full steps are, as far as KV and slots are free
    decoded     running requests have a token of each of these steps, and of the steps in the rest of the time
    ended       requests end as lengths of answers say (`judge.cohorts`), and free their KV
    preempted   where KV has grown beyond what there is, requests lose theirs, and wait to be computed again, before
                those that have not begun

The currency is request-seconds: one for each second of a request that has begun to answer, `WAIT_WEIGHT` for each
second of one that waits for its first token, and `miss_s` for a request that misses its limits. From then on each
request counts with the 99th percentile of TTFT (`judge.tails`), as much for a second as one that waits, and more where
that is near its limit and no queue stands: users judge a service by its tail. What is left at the end counts as long as
it will take. So queues, TTFT, TPOT, computing again and stalls add up in one unit, and a layout that serves the same
with fewer requests in flight is better (Little's law).
"""

from dataclasses import dataclass, fields

import numpy as np

from pengserve.planners.columns import Floats
from pengserve.planners.judge.cohorts import Lengths
from pengserve.planners.judge.course import course_of
from pengserve.planners.judge.rows import Rows
from pengserve.planners.judge.step_rates import StepRates
from pengserve.planners.judge.tails import Tails, share_above

WAIT_WEIGHT = 16.0  # request-seconds of a second before the first token
TAIL_MISS = 0.2  # of what a miss costs: for each request, where the 99th percentile of TTFT is at its limit
MOST_BEYOND = 3.0  # limits: a later tail counts as this one, for what is late counts as missed besides
TPOT_SPREAD = 0.15  # of the logarithm of requests' TPOT around the mean


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

    def part(self, begin: int, end: int) -> "Fate":
        """Of the rows from `begin` to before `end`."""
        return Fate(**{f.name: getattr(self, f.name)[begin:end] for f in fields(self)})


def mean_rate(rows: Rows, horizon_s: Floats | float) -> Floats:
    """Requests that come by second, in the mean over the horizon."""
    share = rows.burst_s / horizon_s * (1.0 - np.exp(-horizon_s / rows.burst_s))
    found: Floats = rows.later_rate + share * (rows.rate - rows.later_rate)
    return found


def predict(rows: Rows, horizon_s: Floats | float) -> Fate:
    """The fate of each row within `horizon_s`, which may differ from row to row."""
    rates = StepRates(rows)
    course, tails = course_of(rows, horizon_s, rates), Tails(rows, rates)
    now, length, steps = course.slices, course.length_s, course.steps
    waiting, running, prompt, limit_s = course.waiting, course.running, rows.prompt_tokens, rows.ttft_limit_s
    # Those that were preempted wait and are read like others, but had their first token: they count as if they ran.
    resumed, again_left = now.resumed, now.again - now.resumed
    again_s = 0.5 * (now.again + again_left) * length
    first, last = now.new - resumed, now.waiting - again_left
    # Seconds of requests that wait and run, and what they get for them.
    wait_s = _sum(0.5 * (now.before - now.again + last) * length)
    run_s = _sum(now.middle * now.live_s + now.running * (length - now.live_s) + again_s)
    begun, decoded = _sum(first), np.maximum(1e-9, _sum(now.middle * now.num_steps))
    # First tokens: those that come together are read together; a queue that stands counts by itself.
    behind = tails.behind(now.rate, now.steps)
    alone_s = rates.first_token_s(now.steps, now.prompt + rows.mates * prompt)
    each_s = alone_s + behind.chance * behind.longest_s
    read_s, run_s = _sum(first * each_s), run_s + _sum(resumed * each_s)
    standing_s = now.standing / now.steps.rate
    last_s = first * tails.tail_of(now.steps, now.prompt, alone_s, behind, standing_s)
    tail_s, beyond = _sum(last_s), np.minimum(MOST_BEYOND * first, last_s / limit_s)
    near = _sum(beyond * np.maximum(0.0, 1.0 - standing_s / limit_s))
    queue_s = np.minimum(horizon_s, last * length / np.maximum(first, 1e-9))
    late = _sum(first * tails.late_share(alone_s, queue_s, behind))
    token_s = np.where(now.live_s > 0, now.live_s / now.num_steps, 0.0)
    slow = _sum(now.ended * share_above(token_s, rows.tpot_limit_s, TPOT_SPREAD))
    usual_s = _sum(now.middle * now.live_s) / decoded
    after = usual_s + now.away_s / np.maximum(resumed * rows.output_tokens, 1e-9)
    usual_share = share_above(usual_s, rows.tpot_limit_s, TPOT_SPREAD)
    slow += _sum(resumed * (share_above(after, rows.tpot_limit_s, TPOT_SPREAD) - usual_share))
    # What is left takes as long as a full group needs for it: a queue its square over twice the rate.
    usual = prompt + Lengths.of(rows.output_tokens, rows.output_spread).mean_age
    most = np.minimum(rows.slots, rows.kv_tokens / usual)
    full = rates.of(most, usual, prompt)
    per_s = 1.0 / (prompt / steps.rate + rows.output_tokens * full.decode_s / np.maximum(1.0, most))
    # Tokens of what waits come among others' prompts, as `most` running and `per_s` that end say (Little). Tokens of
    # what runs count at the speed of decoding alone: else a layout whose memory lets more run would pay for that twice.
    again, fresh = course.again, waiting - course.again
    left_s = (WAIT_WEIGHT * fresh * (again + 0.5 * fresh) + 0.5 * again * again + waiting * most) / per_s
    left_s = left_s + running * rows.output_tokens * steps.decode_s * 0.5
    late += np.maximum(0.0, fresh - np.maximum(0.0, per_s * limit_s - again))
    slow += running * share_above(steps.decode_s, rows.tpot_limit_s, TPOT_SPREAD)
    after = steps.decode_s + (course.away_s / np.maximum(again, 1e-9) + 0.5 * again / per_s) / rows.output_tokens
    slow += again * share_above(after, rows.tpot_limit_s, TPOT_SPREAD)
    missed = late + slow * (1.0 - late / np.maximum(begun + fresh, late + 1e-9))
    return Fate(
        cost_s=WAIT_WEIGHT * (wait_s + tail_s) + run_s + left_s + rows.miss_s * (missed + TAIL_MISS * near),
        ttft_s=(wait_s + read_s) / np.maximum(begun + fresh, 1e-9),
        tail_s=tail_s / np.maximum(begun, 1e-9),
        tpot_s=run_s / decoded,
        queue=waiting,
        running=running,
        finished=_sum(now.ended),
        recomputed_tokens=course.recomputed_tokens,
        missed=missed,
        read_share=mean_rate(rows, horizon_s) * prompt / steps.rate,
        request_s=wait_s + read_s + run_s,
        full_s=_sum(length * now.is_full),
    )


def _sum(by_slice: Floats) -> Floats:
    """Of all slices."""
    found: Floats = np.add.reduce(by_slice, axis=0)
    return found
