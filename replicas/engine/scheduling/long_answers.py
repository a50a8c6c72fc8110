"""Lets long answers give way to prompts that wait for memory, as `planners/long_answers.py` says, in vLLM's scheduler.

An answer that gave way is in vLLM's waiting queue; it moves, ends and counts as any request that was preempted. While a
step is scheduled it is not there, so that no step begins it before its time. Nothing is looked at while no request here
has an SLO for its first token, or none waits.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from pengserve.planners.long_answers import DEFAULT, Answer, GivingWay, gives_way, goes_on, has_waited
from pengserve.planners.types.units import blocks_for
from pengserve.replicas.engine.scheduling.late_prompts import FirstTokens, has_begun
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle, is_prefilling
from pengserve.replicas.engine.vllm_seam import Request


class Paces(FirstTokens, Protocol):
    """Who knows which SLOs requests have: `replicas/contracts.py`."""

    def is_paced(self, request_id: str) -> bool:
        """Whether a request has an SLO for the time between its tokens: it gives way to none."""
        ...


class LongAnswers:
    """Belongs to the step thread of a member that schedules, and whose KV is on the device alone."""

    def __init__(
        self,
        scheduler: SchedulerHandle,
        known: Paces,
        block_size: int,
        num_free: Callable[[], int],
        num_blocks: Callable[[], int],
        *,
        rules: GivingWay = DEFAULT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            block_size: tokens of a block.
            num_free: blocks that are free, or that the lane can get while it runs.
            num_blocks: all that it may hand out.
            clock: seconds.
        """
        self._scheduler, self._known, self._block_size = scheduler, known, block_size
        self._num_free, self._num_blocks = num_free, num_blocks
        self._rules, self._clock = rules, clock
        self._aside: dict[Request, float] = {}  # answers that gave way, and since when they wait

    def stepping(self) -> contextlib.AbstractContextManager[None] | None:
        """Around the next step, and around all that orders what waits for it; None: it is as vLLM has it."""
        return self._step() if self._aside or self._victim() is not None else None

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        waiting = self._scheduler.waiting
        there = set(waiting)  # others have ended, or gone elsewhere
        self._aside = {request: since_s for request, since_s in self._aside.items() if request in there}
        waiting.remove_requests(set(self._aside))
        try:
            self._let_go_on()
            if (victim := self._victim()) is not None:
                self._scheduler.give_way(victim)
                self._scheduler.departures.by_memory += 1
                self._aside[victim] = self._clock()
                waiting.remove_requests([victim])
            yield
        finally:
            for request in self._aside:
                if self._scheduler.knows(request.request_id):  # a token that was on its way can have been its last
                    waiting.add_request(request)

    def _let_go_on(self) -> None:
        now_s = self._clock()
        for request, since_s in list(self._aside.items()):
            has_room = self._has_room(request)
            if has_room or has_waited(request.num_output_tokens, now_s - since_s, self._rules):
                del self._aside[request]
                self._scheduler.waiting.prepend_request(request)
            if has_room:
                break  # for one: what it takes is not taken yet

    def _has_room(self, request: Request) -> bool:
        scheduler = self._scheduler
        if any(not has_begun(other) for other in scheduler.waiting):
            return False
        if not (scheduler.running or scheduler.holding or scheduler.waiting):
            return True
        return goes_on(self._num_free(), self._blocks_of(request), self._num_blocks(), self._rules)

    def _victim(self) -> Request | None:
        """Who gives way now."""
        scheduler = self._scheduler
        if not (self._known.num_hurried and scheduler.waiting) or scheduler.holding:
            return None
        if not (scheduler.takes_new and scheduler.new_slots):
            return None
        prompt = scheduler.next_waiting
        if has_begun(prompt) or self._known.gone(prompt.request_id) < self._rules.gone:
            return None
        # What it shares with others is looked for only where it matters.
        if self._num_missing(prompt) <= 0 or not (answers := self._answers(prompt)):
            return None
        missing = self._num_missing(prompt) - len(scheduler.cached_prefix(prompt)[1])
        index = gives_way([self._answer(request) for request in answers], missing, self._rules) if missing > 0 else None
        if index is None:
            return None
        alone, _ = scheduler.blocks_freed([answers[index].request_id])[answers[index].request_id]
        return answers[index] if alone >= self._rules.worth * missing else None

    def _num_missing(self, prompt: Request) -> int:
        watermark = self._scheduler.watermark_blocks if self._scheduler.running else 0
        return self._blocks_of(prompt) + watermark - self._num_free()

    def _answers(self, prompt: Request) -> list[Request]:
        """Running requests that could give way to this prompt."""
        longer, by_priority = self._rules.min_tokens, self._scheduler.goes_by_priority
        return [
            request
            for request in self._scheduler.running
            if request.num_output_tokens > longer
            and not is_prefilling(request)
            and not (by_priority and request.priority < prompt.priority)
            and not self._known.is_paced(request.request_id)
        ]

    def _answer(self, request: Request) -> Answer:
        num_computed = request.num_computed_tokens
        num_blocks = blocks_for(num_computed, self._block_size)
        return Answer(request.num_output_tokens, num_computed, num_blocks, request.num_preemptions)

    def _blocks_of(self, request: Request) -> int:
        return blocks_for(request.num_tokens, self._block_size)
