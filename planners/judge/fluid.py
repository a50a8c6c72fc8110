"""What will become of groups of instances within a horizon: requests as a fluid that is read, decoded, and ends.

A row is one group, now or as it would be. `servers` of it compute side by side: one where it is alone or
tensor-parallel, one for each stage of a pipeline, in which so many microbatches are under way. In each slice of time:

    read        waiting prompts are read, as fast as full steps are, as far as KV and slots are free
    decoded     running requests have a token of each of these steps, and of the steps in the rest of the time
    ended       by the mean length of an answer, tokens end requests, and these free their KV
    preempted   where KV has grown beyond what there is, requests lose theirs, and wait to be computed again

The currency is request-seconds: one for each second of a request that runs, `WAIT_WEIGHT` for each second of one that
has no token yet. What is left at the end counts as long as it will take. So queues, TTFT, TPOT, computing again and stalls
add up in one unit, and a layout that serves the same with fewer requests in flight is the better one (Little's law).
"""

from dataclasses import dataclass

import numpy as np

from pengserve.planners.columns import Floats
from pengserve.planners.types.step_cost import KNOT_TOKENS

WAIT_WEIGHT = 3.0  # request-seconds of a second without a first token
STEP_TOKENS = 2048  # new tokens of a full step, as vLLM's default is
SLICES = 24  # of the horizon; the later ones are longer
GROWTH = 1.08  # of a slice over the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Groups to predict, an entry each. Rates are by second, KV is in tokens."""

    servers: Floats
    cost: Floats  # [row, term]: of one server's step, in the order of `StepCost.terms`
    kv_tokens: Floats
    slots: Floats  # requests that may run, of all servers together
    running: Floats
    held_tokens: Floats  # of running requests
    waiting: Floats
    waiting_tokens: Floats
    stall_s: Floats  # from now on, in which nothing runs
    rate: Floats  # requests that come
    prompt_tokens: Floats
    output_tokens: Floats
    pairs: Floats  # that a token of a prompt adds to a step (`StepCost.pair_s`)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What becomes of each row."""

    cost_s: Floats  # request-seconds, see above
    ttft_s: Floats  # mean of those that begin
    tpot_s: Floats  # mean
    queue: Floats  # requests that wait at the end
    running: Floats  # ... and that run
    finished: Floats  # requests
    recomputed_tokens: Floats
    step_s: Floats  # of a full step
    request_s: Floats  # of all that wait and run within the horizon, alike


def slices(horizon_s: float) -> Floats:
    """Seconds of each slice of time."""
    lengths = GROWTH ** np.arange(SLICES)
    found: Floats = horizon_s * lengths / lengths.sum()
    return found


def predict(rows: Rows, horizon_s: float) -> Fate:
    """The fate of each row within `horizon_s`."""
    servers, kv, prompt, output = rows.servers, rows.kv_tokens, rows.prompt_tokens, rows.output_tokens
    load, token, extra, seq, context, pair = rows.cost.T
    running, held = rows.running.copy(), rows.held_tokens.copy()
    waiting, waiting_tokens, stall = rows.waiting.copy(), rows.waiting_tokens.copy(), rows.stall_s.copy()
    whole = prompt + output
    pairs_s = pair * rows.pairs
    zero = np.zeros_like(kv)
    wait_s, run_s, read_s, begun, finished, decoded, recomputed = (zero.copy() for _ in range(7))
    decode_s, full_s = zero, zero
    for length in slices(horizon_s):
        # Arrivals.
        came = rows.rate * length
        before = waiting
        waiting, waiting_tokens = waiting + came, waiting_tokens + came * prompt
        live = np.maximum(0.0, length - stall)
        stall = np.maximum(0.0, stall - length)
        # Steps of decoding alone, and full ones.
        each, kv_each = running / servers, held / servers
        fixed_s = load + seq * each + context * kv_each
        decode_s = fixed_s + token * each + extra * np.maximum(0.0, each - KNOT_TOKENS)
        room = np.maximum(64.0, STEP_TOKENS - each)
        mean = np.maximum(1.0, waiting_tokens / np.maximum(waiting, 1e-9))
        full = each + room
        full_s = fixed_s + token * full + extra * np.maximum(0.0, full - KNOT_TOKENS)
        full_s = full_s + room * (pairs_s + context + seq / mean)
        rate = servers * room / full_s  # tokens of prompts read by a second of full steps
        # Read, as far as there is memory, slots and time.
        free = np.minimum(np.maximum(0.0, kv - held), np.maximum(0.0, rows.slots - running) * mean)
        read = np.minimum(np.minimum(waiting_tokens, free), rate * live)
        busy = np.minimum(live, read / rate)
        new = read / mean
        # Decoded, beside full steps and in the rest of the time.
        tokens = (running + 0.5 * new) * (busy / full_s + (live - busy) / decode_s)
        ended = np.minimum(running + new, tokens / output)
        # One prompt takes the step under way and its own steps, among others' decodes.
        share = np.minimum(prompt, room)
        own_s = fixed_s + token * (each + share) + extra * np.maximum(0.0, each + share - KNOT_TOKENS) + pairs_s * share
        alone_s = own_s * prompt / share + 0.5 * np.minimum(1.0, each) * decode_s
        waiting_tokens, waiting = waiting_tokens - read, np.maximum(0.0, waiting - new)
        running = running + new - ended
        held = np.clip(held + read + tokens - ended * whole, running * np.minimum(prompt, mean) * 0.5, None)
        # Preempted.
        over = np.maximum(0.0, held - kv)
        lost = np.minimum(running, over / np.maximum(1.0, held / np.maximum(running, 1e-9)))
        held, running = held - over, running - lost
        waiting, waiting_tokens = waiting + lost, waiting_tokens + over
        wait_s += 0.5 * (before + waiting) * length
        run_s += running * length
        read_s += new * alone_s
        begun, finished, decoded, recomputed = begun + new, finished + ended, decoded + tokens, recomputed + over
    # What is left takes as long as a full group needs for it: a queue its square over twice the rate.
    per_s = 1.0 / np.maximum(1e-9, mean / rate + output * decode_s / np.maximum(1.0, _most_running(rows)))
    left_s = WAIT_WEIGHT * waiting * waiting / (2.0 * per_s) + waiting * output * full_s
    left_s = left_s + running * 0.5 * output * decode_s
    return Fate(
        cost_s=WAIT_WEIGHT * (wait_s + read_s) + run_s + left_s,
        ttft_s=(wait_s + read_s) / np.maximum(begun, 1e-9),
        tpot_s=run_s / np.maximum(decoded, 1e-9),
        queue=waiting,
        running=running,
        finished=finished,
        recomputed_tokens=recomputed,
        step_s=full_s,
        request_s=wait_s + run_s,
    )


def _most_running(rows: Rows) -> Floats:
    """Requests of mean length that run at once."""
    by_kv = rows.kv_tokens / (rows.prompt_tokens + 0.5 * rows.output_tokens)
    most: Floats = np.minimum(rows.slots, by_kv)
    return most
