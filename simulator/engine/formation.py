"""Microbatches of a pipeline for the fast scheduler: the production planner (KunServe 4.3) over its own requests.

Chooses as `replicas.engine.scheduling.microbatches` does for vLLM's scheduler, without vLLM, and with a cost model
that is right.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from pengserve.planners.cost_model import Chunk, CostModel
from pengserve.planners.lookahead import MicrobatchLimits, Work, chunks_within, next_budget
from pengserve.simulator.engine.queues import Entry

MIN_TOKENS = 32  # no microbatch is made smaller than this, but to give every stage something to do


class Formation:
    """Says which requests go into the next microbatch, and remembers since when each has been ready."""

    def __init__(self, model: CostModel, *, max_in_flight: int, max_tokens: int, max_requests: int) -> None:
        self._model, self._max_in_flight = model, max_in_flight
        self._limits = MicrobatchLimits(
            max_tokens=max_tokens, max_requests=max_requests, min_tokens=min(MIN_TOKENS, max_tokens)
        )
        self._clock = itertools.count(1)
        self._newest: tuple[Sequence[Work], Mapping[str, int]] = (), {}
        self._since: dict[str, int] = {}  # request -> when it became ready, in steps of the clock

    def budget(
        self, running: Sequence[Entry], waiting: Iterable[Entry], in_flight_s: Sequence[float]
    ) -> Mapping[str, int]:
        """New tokens by request id, in the order in which they are to be scheduled. `in_flight_s` as `cost_s` gave."""
        work = [self._work(entry, True) for entry in running if entry.tokens > entry.computed]
        work += [self._work(entry, False) for entry in waiting if entry.tokens > entry.computed]
        budget = next_budget(work, in_flight_s, self._model, self._limits, max_in_flight=self._max_in_flight)
        self._newest = work, budget
        return budget

    def planned_s(self) -> float:
        """What the newest microbatch was chosen to cost."""
        return self._model.batch_s(chunks_within(*self._newest))

    def cost_s(self, chunks: Iterable[Chunk]) -> float:
        """What a microbatch costs on the whole model."""
        return self._model.batch_s(chunks)

    def came_back(self, request_ids: Iterable[str]) -> None:
        """These requests have left the last stage together."""
        now = next(self._clock)
        for request_id in request_ids:
            self._since[request_id] = now

    def forget(self, request_id: str) -> None:
        """A request has ended or gone."""
        self._since.pop(request_id, None)

    def _work(self, entry: Entry, is_running: bool) -> Work:
        num_tokens = entry.tokens - entry.computed
        since = self._since.get(entry.live.arrival.request_id, 0) if is_running else math.inf
        return Work(
            request_id=entry.live.arrival.request_id,
            prefix_tokens=entry.computed,
            num_tokens=num_tokens,
            is_prefill=num_tokens > 1,
            since=0 if is_running and num_tokens > 1 else since,  # a prompt that has begun goes on before others begin
        )
