"""Requests of a simulation: what arrives, what lives, and what is known of it when it has ended."""

from dataclasses import dataclass, field

from pengserve.planners.types.ids import InstanceKey

ROUNDING = 1.0 + 1e-9  # of times


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One row of a trace."""

    request_id: str
    at_s: float  # after the start of the trace
    prompt_tokens: int
    output_tokens: int  # it generates exactly so many, and no scheduler knows it before
    prefix_ids: tuple[int, ...] = ()  # of the prompt's full `prefix_block` tokens: equal ids are equal content before
    prefix_block: int = 0  # tokens of one of `prefix_ids`
    priority: int = 0  # as in vLLM: below zero is urgent
    ttft_s: float | None = None  # the SLO of its first token
    tbt_s: float | None = None  # ... between two of its tokens
    degree: int | None = None  # the tensor-parallel degree that it asks for; 1 is dp, None: any


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request on its way. One object from its arrival to its end, wherever it runs."""

    arrival: Arrival
    num_generated: int = 0
    came_s: float = 0.0  # by the loop's time
    at: InstanceKey | None = None  # the leader that it was sent to
    scheduled_s: float | None = None  # its first step began
    first_token_s: float | None = None
    last_token_s: float | None = None
    longest_gap_s: float = 0.0  # between two of its tokens
    num_preemptions: int = 0
    num_moves: int = 0  # from shape to shape, or instance to instance
    cached_tokens: int = 0  # of its prompt, that its first instance found in its prefix cache
    stalls_s: float = field(default=0.0)  # that switches and swaps kept it from running
    num_late: int = 0  # tokens later than `tbt_s` after the one before
    num_late_paced: int = 0  # ... where the client is sent one token an SLO interval while some are in store
    paced_s: float | None = None  # when the client would be sent the newest token then

    @property
    def request_id(self) -> str:
        """Its name in the trace."""
        return self.arrival.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and what has been generated: what it computes again where its KV is lost."""
        return self.arrival.prompt_tokens + self.num_generated

    def gone(self, now_s: float) -> float:
        """Share of the time to its first token that is gone; 0 where it has no SLO for it."""
        return (now_s - self.came_s) / self.arrival.ttft_s if self.arrival.ttft_s else 0.0

    def deposit_tokens(self, now_s: float) -> int:
        """Tokens that a client who is sent one an SLO interval has not been sent (OrbitFlow section 3.2)."""
        if self.paced_s is None or not self.arrival.tbt_s:
            return 0
        return max(0, int((self.paced_s - now_s) / self.arrival.tbt_s))

    def note_token(self, at_s: float, before_s: float | None, count: int = 1) -> None:
        """Its next `count` tokens came at `at_s`, so long after each other as after the one at `before_s`."""
        limit_s = self.arrival.tbt_s
        if limit_s is None:
            return
        if before_s is None or self.paced_s is None:
            self.paced_s = at_s
            return
        gap_s = (at_s - before_s) / count
        for index in range(1, count + 1):
            token_s, due_s = before_s + index * gap_s, self.paced_s + limit_s
            self.num_late += gap_s > limit_s * ROUNDING
            self.num_late_paced += token_s > due_s + limit_s * (ROUNDING - 1.0)
            self.paced_s = max(token_s, due_s)

    @property
    def is_done(self) -> bool:
        """Whether its last token is there."""
        return self.num_generated >= self.arrival.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request. Times are virtual seconds since the start; None: it never came so far."""

    request_id: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int  # generated
    scheduled_s: float | None
    first_token_s: float | None
    end_s: float | None  # its last token, where it ended well
    longest_gap_s: float
    num_preemptions: int
    num_moves: int
    priority: int = 0
    cached_tokens: int = 0  # of the prompt, found in a prefix cache
    num_late: int = 0  # of its tokens after the first: later than its TBT SLO
    num_late_paced: int = 0  # ... with a token deposit
    refused: str = ""  # why it was not served; one sentence

    @property
    def ttft_s(self) -> float | None:
        """From its arrival to its first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None where there was no second."""
        if self.end_s is None or self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)
