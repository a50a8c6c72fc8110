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


class StepRates:
    """Made once for all slices of time: what does not change from slice to slice is computed here."""

    def __init__(self, rows: Rows) -> None:
        self._servers, self._step_tokens, self._read_share = rows.servers, rows.step_tokens, rows.read_share
        self._load, self._token, self._extra, self._seq, self._context, self._pair = np.ascontiguousarray(rows.cost.T)
        # Of a token beyond the knot, and what that is too much by for those before it.
        self._dear, self._knot = self._token + self._extra, self._extra * KNOT_TOKENS
        self._read_s = self._pair * rows.pairs + self._context  # of a token of a prompt, beside what every token costs

    def of(self, running: Floats, each_tokens: Floats, prompt: Floats) -> Steps:
        """`each_tokens`: KV of one that runs. `prompt`: tokens of one that waits."""
        batch = running / self._servers
        fixed_s = np.maximum(LEAST_STEP_S, self._load + batch * (self._seq + self._context * each_tokens))
        room = np.maximum(64.0, self._step_tokens - batch)
        full_s = fixed_s + self._tokens_s(batch + room) + room * (self._read_s + self._seq / prompt)
        rate = self._servers * room / (full_s * self._read_share)
        return Steps(batch, room, fixed_s, fixed_s + self._tokens_s(batch), full_s, rate)

    def first_token_s(self, steps: Steps, prompt: Floats) -> Floats:
        """From arriving to the first token, where nothing is in the way but the step under way: a prompt of so many
        tokens waits for this step, and takes its own steps, among others' decodes.
        """
        servers, num_tokens = self._servers, self._read_share * prompt
        share = np.minimum(num_tokens, steps.room)
        parts = num_tokens / share
        own_s = self._tokens_s(steps.batch + share) * parts + (self._pair * num_tokens + self._context) * num_tokens
        # The stages of a pipeline read chunks of one prompt side by side: n chunks take n + s - 1 times a stage's time,
        # which is 1/s of a step, and of the prompt itself 1/(n s).
        num_chunks = np.maximum(servers, parts)
        turns = (num_chunks + servers - 1.0) / servers
        waiting_s = 0.5 * np.minimum(1.0, steps.batch) * steps.decode_s / servers
        first_s: Floats = waiting_s + turns * (steps.fixed_s + own_s / num_chunks)
        return first_s

    def _tokens_s(self, num_tokens: Floats) -> Floats:
        """What every token costs, of so many in a step: more beyond the knot."""
        found: Floats = np.maximum(self._token * num_tokens, self._dear * num_tokens - self._knot)
        return found
