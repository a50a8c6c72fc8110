"""Conversations: each turn's prompt is all that was said before and what the user says now."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import ClassVar

import numpy as np

from pengserve.planners.types.errors import ConfigError
from pengserve.simulator.requests import Arrival
from pengserve.simulator.traces import checks
from pengserve.simulator.traces.generators.lengths import Lengths
from pengserve.simulator.traces.generators.rates import RateCurve
from pengserve.simulator.traces.randomness import streams


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiTurn:
    """Conversations that start as a Poisson process; turns are geometric in number, with exponential pauses between.

    Lengths are of what the user says in a turn (prompt) and of the reply (output). A conversation ends early where its
    next turn would exceed `max_tokens`. All begin with the same `system_tokens`. `prefix_ids` of a turn begin with
    those of the turn before, so a prefix cache that kept them computes the new part alone.
    """

    default_lengths: ClassVar[Lengths | None] = None

    conversations_per_s: float
    duration_s: float  # in which conversations start; their later turns may come after it
    mean_turns: float = 4.0
    mean_pause_s: float = 10.0  # from the end of a reply to the next turn
    reply_s_per_token: float = 0.04  # until the reply has ended, as a trace that waits for no server must assume
    system_tokens: int = 0
    prefix_block: int = 16
    max_tokens: int = 8192

    def __post_init__(self) -> None:
        checks.above_zero(
            conversations_per_s=self.conversations_per_s,
            duration_s=self.duration_s,
            prefix_block=self.prefix_block,
            max_tokens=self.max_tokens,
        )
        checks.not_negative(
            mean_pause_s=self.mean_pause_s, reply_s_per_token=self.reply_s_per_token, system_tokens=self.system_tokens
        )
        if not 1 <= self.mean_turns < float("inf"):
            raise ConfigError(f"mean_turns must be a number, 1 or more, got {self.mean_turns!r}")

    def generate(self, lengths: Lengths, seed: int) -> tuple[Arrival, ...]:
        """As `Generator`, except that later turns come later where replies are longer."""
        times, sizes, talk = streams(seed, "multi_turn", 3)
        starts = RateCurve.of_levels([(self.duration_s, self.conversations_per_s)]).arrivals(times)
        fresh_ids = count(self.system_tokens // self.prefix_block)
        turns = [
            turn
            for number, start_s in enumerate(starts.tolist())
            for turn in self._conversation(number, start_s, lengths, sizes, talk, fresh_ids)
        ]
        if not turns:
            raise ConfigError(
                "no turn arrives: give more conversations_per_s, a longer duration_s, or max_tokens above the lengths"
            )
        return tuple(sorted(turns, key=lambda turn: turn.at_s))

    def _conversation(
        self,
        number: int,
        at_s: float,
        lengths: Lengths,
        sizes: np.random.Generator,
        talk: np.random.Generator,
        fresh_ids: Iterator[int],
    ) -> Iterator[Arrival]:
        num_turns = int(talk.geometric(1.0 / self.mean_turns))
        pauses = talk.exponential(self.mean_pause_s, size=num_turns).tolist()
        said, replies = lengths.draw(sizes, num_turns)
        ids = list(range(self.system_tokens // self.prefix_block))
        prompt_tokens = self.system_tokens
        for turn, (said_tokens, reply_tokens) in enumerate(zip(said.tolist(), replies.tolist(), strict=True)):
            prompt_tokens += said_tokens
            if prompt_tokens + reply_tokens > self.max_tokens:
                return
            ids += islice(fresh_ids, prompt_tokens // self.prefix_block - len(ids))
            yield Arrival(
                request_id=f"c{number}.{turn}",
                at_s=round(at_s, 6),
                prompt_tokens=prompt_tokens,
                output_tokens=reply_tokens,
                prefix_ids=tuple(ids),
                prefix_block=self.prefix_block,
            )
            prompt_tokens += reply_tokens
            at_s += reply_tokens * self.reply_s_per_token + pauses[turn]
