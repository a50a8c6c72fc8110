"""Tells vLLM's scheduler which prompts a step reads, as `planners/chunk_share.py` says.

Nothing is done, and no request is looked at, while all requests that came lately are of one band: so where there are
neither priorities nor shares of tenants.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

from pengserve.planners.chunk_share import MIN_TOKENS, TURN_STEPS, Chunks, Prompt, plan_chunks
from pengserve.planners.fairness import LIFTED
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle, is_prefilling
from pengserve.replicas.engine.vllm_seam import Request

LATELY_S = 10.0
MAX_BANDS = 64  # that are remembered
KEEP = 0.9  # weight of earlier steps, after one more, in how fast prompts are read


class ChunkShares:
    """Belongs to the step thread of a member that schedules."""

    def __init__(self, scheduler: SchedulerHandle, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._scheduler, self._clock = scheduler, clock
        self._seen_s: dict[int, float] = {}  # when a request of a band last came, by band; the newest last
        self._passed: dict[str, int] = {}  # steps since a running request was last read in which it was passed over
        self._num_passing = 0  # steps in a row in which one was, since the last turn
        self._tried: list[tuple[Request, int]] = []  # who was to be read in place of others, and its tokens before
        self._rest = 0  # steps in which none is passed over, as more urgent ones could not begin
        self._read = self._reading_s = 0.0  # tokens of prompts, and the time of the steps that read them, decayed
        self._was_reading = False

    @property
    def is_on(self) -> bool:
        """Whether requests of several bands came lately."""
        return len(self._seen_s) > 1

    def note(self, band: int) -> None:
        """A request of this band came, or has this band from now on.

        One that is lifted for its age is no sign that urgent ones come: nothing is kept short for the next one.
        """
        if not self._scheduler.goes_by_priority or band <= LIFTED:
            return
        self._seen_s.pop(band, None)
        self._seen_s[band] = self._clock()
        if len(self._seen_s) > MAX_BANDS:
            del self._seen_s[next(iter(self._seen_s))]

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Within it vLLM schedules a step that reads the prompts which have a share in it. Only where `is_on`."""
        scheduler, prompts = self._scheduler, self._prompts()
        decoding = [request for request in scheduler.running if not is_prefilling(request)]
        chunks = self.plan(prompts, sum(map(self._step_tokens, decoding)))
        if chunks.max_tokens is not None:
            scheduler.decode_first()
        passed = [request for request in prompts if request.request_id in chunks.passed]
        before, started_s = sum(request.num_computed_tokens for request in prompts), self._clock()
        with scheduler.passing_over(passed), scheduler.limited(max_tokens=chunks.max_tokens):
            yield
        num_read = sum(request.num_computed_tokens for request in prompts) - before
        self._learn(num_read, self._clock() - started_s)

    def _learn(self, num_read: int, seconds: float) -> None:
        """Of how fast prompts are read. A step that is scheduled ahead takes its time in the next call."""
        is_reading = num_read >= MIN_TOKENS
        if is_reading or self._was_reading:
            self._read = KEEP * self._read + max(0, num_read)
            self._reading_s = KEEP * self._reading_s + seconds
        self._was_reading = is_reading

    def plan(self, prompts: Sequence[Request], num_decoding: int) -> Chunks:
        """Shares the next step out: a step of all, or a microbatch. It is made before this is called again.

        Args:
            prompts: requests whose prompt it could read.
            num_decoding: tokens that it computes of others.
        """
        self._forget()
        if self._tried and all(request.num_computed_tokens == before for request, before in self._tried):
            self._rest = TURN_STEPS  # the urgent ones could not begin: there are no blocks for them yet
        chunks = self._share_out(prompts, num_decoding) if self.is_on else Chunks()
        self._passed = {request_id: self._passed.get(request_id, 0) + 1 for request_id in chunks.passed}
        self._tried = []
        self._num_passing = self._num_passing + 1 if chunks.passed and not chunks.is_turn else 0
        if self._num_passing:
            self._tried = [(r, r.num_computed_tokens) for r in prompts if r.request_id not in chunks.passed]
        self._scheduler.departures.by_band += bool(chunks.passed)
        return chunks

    def _share_out(self, prompts: Sequence[Request], num_decoding: int) -> Chunks:
        if self._rest:
            self._rest -= 1
            return Chunks()
        running = set(map(id, self._scheduler.running))
        found = [
            Prompt(
                request_id=request.request_id,
                band=request.priority,
                num_tokens=request.num_tokens - request.num_computed_tokens,
                num_passed=self._passed.get(request.request_id, 0),
                is_running=id(request) in running,
            )
            for request in prompts
        ]
        most_urgent = min(self._seen_s, default=0)
        return plan_chunks(
            found,
            most_urgent,
            num_decoding,
            self._scheduler.max_step_tokens,
            self._num_passing,
            tokens_per_s=self._read / self._reading_s if self._reading_s else 0.0,
        )

    def _step_tokens(self, request: Request) -> int:
        """Of a request that decodes: one, and those that were guessed."""
        return 1 + len(request.spec_token_ids)

    def _prompts(self) -> list[Request]:
        """Requests whose prompt is being read, and those that may begin."""
        scheduler = self._scheduler
        new = itertools.islice(scheduler.waiting, scheduler.new_slots if scheduler.takes_new else 0)
        return [*filter(is_prefilling, scheduler.running), *new]

    def _forget(self) -> None:
        """Bands of which no request came lately."""
        now_s = self._clock()
        while self._seen_s and now_s - next(iter(self._seen_s.values())) > LATELY_S:
            del self._seen_s[next(iter(self._seen_s))]
