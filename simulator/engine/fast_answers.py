"""Long answers that give way to prompts that wait for memory, as `replicas/engine/scheduling/long_answers.py` has them
in vLLM's scheduler.
"""

import contextlib
from collections.abc import Callable, Iterator
from math import ceil, inf

from pengserve.planners.long_answers import Answer, GivingWay, gives_way, goes_on, has_waited
from pengserve.planners.types.units import blocks_for
from pengserve.simulator.engine.fast_state import FastState
from pengserve.simulator.engine.queues import Entry


class FastAnswers:
    """Of one fast scheduler."""

    def __init__(self, state: FastState, rules: GivingWay, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._state, self._rules, self._clock = state, rules, clock
        self._aside: dict[Entry, float] = {}  # answers that gave way, and since when they wait
        self.preempted: list[Entry] = []  # that gave way since this was emptied

    def calm_steps(self) -> float:
        """So many steps of decodes can follow each other in which no answer gives way or goes on."""
        if self._aside:
            return 0
        if (prompt := self._prompt()) is None:
            return inf
        rules, size = self._rules, self._state.block_size
        # With each step more is missing, as is where nothing was before, and an answer has more.
        missing = max(1, self._num_missing(prompt))
        least = int((rules.worth * missing - 1) * size) + 1  # tokens that fill so many blocks
        return min(
            [self._steps_until(e, least) for e in self._state.running if self._may_give_way(e, prompt)], default=inf
        )

    def _steps_until(self, entry: Entry, least: int) -> float:
        """Decodes until a request could give way, where it must have the KV of so many tokens."""
        rules, generated, computed = self._rules, entry.live.num_generated, entry.computed
        again = ceil((computed - rules.again * generated) / (rules.again - 1.0))  # each step adds to both
        return max(0, rules.min_tokens + 1 - generated, least - computed, again)

    def stepping(self) -> contextlib.AbstractContextManager[None] | None:
        """Around the next step, and around all that orders what waits for it; None: it is as vLLM has it."""
        return self._step() if self._aside or self._victim() is not None else None

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        state = self._state
        there = set(state.waiting)
        self._aside = {entry: since_s for entry, since_s in self._aside.items() if entry in there}
        state.waiting.remove(set(self._aside))
        self._let_go_on()
        if (victim := self._victim()) is not None:
            state.preempt(state.running.index(victim))
            self.preempted.append(victim)
            self._aside[victim] = self._clock()
            state.waiting.take(victim)
        yield
        for entry in self._aside:
            state.waiting.append(entry)

    def _let_go_on(self) -> None:
        now_s = self._clock()
        for entry, since_s in list(self._aside.items()):
            has_room = self._has_room(entry)
            if has_room or has_waited(entry.live.num_generated, now_s - since_s, self._rules):
                del self._aside[entry]
                self._state.waiting.prepend(entry)
            if has_room:
                break

    def _has_room(self, entry: Entry) -> bool:
        state = self._state
        if any(not other.has_begun for other in state.waiting):
            return False
        if not (state.running or state.holding or state.waiting):
            return True
        return goes_on(state.free, blocks_for(entry.tokens, state.block_size), state.num_blocks, self._rules)

    def _prompt(self) -> Entry | None:
        """The one that an answer could give way to, now or later."""
        state = self._state
        if not state.waiting or state.holding or len(state.running) >= state.capacity.max_num_seqs:
            return None
        head = state.waiting.head()
        return None if head.has_begun or not head.live.arrival.ttft_s else head

    def _num_missing(self, prompt: Entry) -> int:
        return self._state.blocks_to_begin(prompt) - self._state.free

    def _victim(self) -> Entry | None:
        """Who gives way now."""
        if (prompt := self._prompt()) is None or prompt.live.gone(self._clock()) < self._rules.gone:
            return None
        if (missing := self._num_missing(prompt)) <= 0:
            return None
        decoding = [entry for entry in self._state.running if entry.tokens - entry.computed <= 1]
        able = [entry for entry in decoding if self._may_give_way(entry, prompt)]
        index = gives_way([self._answer(entry) for entry in able], missing, self._rules)
        return None if index is None else able[index]

    def _may_give_way(self, entry: Entry, prompt: Entry) -> bool:
        by_priority = self._state.options.policy == "priority"
        return entry.live.arrival.tbt_s is None and not (by_priority and entry.order[0] < prompt.order[0])

    def _answer(self, entry: Entry) -> Answer:
        num_blocks = blocks_for(entry.computed, self._state.block_size)
        return Answer(entry.live.num_generated, entry.computed, num_blocks, entry.preemptions)
