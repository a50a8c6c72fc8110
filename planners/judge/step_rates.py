"""How long steps take in each row of the fluid model, how fast they read prompts, and when a first token comes."""

from typing import NamedTuple

import numpy as np

from pengserve.planners.columns import Floats
from pengserve.planners.judge.rows import Rows
from pengserve.planners.types.step_cost import KNOT_TOKENS

LEAST_STEP_S = 1e-5  # no engine steps faster: a fit over few steps may say that reading the weights costs nothing


class Steps(NamedTuple):
    """Steps of each row with so many running."""

    batch: Floats  # requests that run, of one server
    room: Floats  # tokens of prompts that a full step takes
    fixed_s: Floats  # of what runs, but for what every token costs
    decode_s: Floats  # of decoding alone
    full_s: Floats  # with as much of prompts as a step takes
    rate: Floats  # tokens of prompts that a second of full steps reads


def steps_of(rows: Rows, running: Floats, each_tokens: Floats, prompt: Floats) -> Steps:
    """`each_tokens`: KV of one that runs. `prompt`: tokens of one that waits."""
    load, token, extra, seq, context, pair = rows.cost.T
    batch = running / rows.servers
    fixed_s = np.maximum(LEAST_STEP_S, load + seq * batch + context * batch * each_tokens)
    decode_s = fixed_s + token * batch + extra * np.maximum(0.0, batch - KNOT_TOKENS)
    room = np.maximum(64.0, rows.step_tokens - batch)
    read_s = pair * rows.pairs + context  # of a token of a prompt, beside what every token costs
    full = batch + room
    full_s = fixed_s + token * full + extra * np.maximum(0.0, full - KNOT_TOKENS) + room * (read_s + seq / prompt)
    rate = rows.servers * room / (full_s * rows.read_share)
    return Steps(batch, room, fixed_s, decode_s, full_s, rate)


def first_token_s(rows: Rows, steps: Steps, prompt: Floats) -> Floats:
    """From arriving to the first token, where nothing is in the way but the step under way: a prompt of so many tokens
    waits for this step, and takes its own steps, among others' decodes.
    """
    _, token, extra, _, context, pair = rows.cost.T
    num_tokens = rows.read_share * prompt
    share = np.minimum(num_tokens, steps.room)
    own = steps.batch + share
    own_s = token * own + extra * np.maximum(0.0, own - KNOT_TOKENS)
    own_s = own_s * num_tokens / share + (pair * num_tokens + context) * num_tokens
    # The stages of a pipeline read chunks of one prompt side by side: n chunks take n + s - 1 times a stage's time,
    # which is 1/s of a step, and of the prompt itself 1/(n s).
    num_chunks = np.maximum(rows.servers, num_tokens / share)
    turns = (num_chunks + rows.servers - 1.0) / rows.servers
    waiting_s = 0.5 * np.minimum(1.0, steps.batch) * steps.decode_s / rows.servers
    first_s: Floats = waiting_s + steps.fixed_s * turns + own_s * turns / num_chunks
    return first_s
