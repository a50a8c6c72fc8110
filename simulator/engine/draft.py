"""How the fast scheduler chooses a step, as vLLM 0.32 does: what runs, in its order, then what waits, in its."""

from collections import deque
from collections.abc import Collection, Sequence
from itertools import chain, islice

from pengserve.planners.short_prompts import IN_ORDER, Overtaking, Prompt, is_any_long, plan_overtaking
from pengserve.planners.types.units import blocks_for
from pengserve.simulator.engine.fast_state import FastState
from pengserve.simulator.engine.formation import Formation
from pengserve.simulator.engine.queues import Entry


class Draft:
    """Who computes how much in the next step, and what was done to make room for it."""

    def __init__(self, state: FastState, budget: int, passed: Collection[Entry] = ()) -> None:
        """Chooses, and gives the chosen their blocks.

        Args:
            budget: new tokens that the step may have.
            passed: running requests that stay out of it.
        """
        self.tokens: dict[Entry, int] = {}  # new ones, in the order in which they were scheduled
        self.admitted: list[Entry] = []
        self.preempted: list[Entry] = []
        self.swapped_out = self.swapped_in = 0  # blocks
        self._state, self._budget = state, budget
        order, entries = _overtaking(state, budget, passed) if state.options.short_prompts else (IN_ORDER, {})
        self.overtakes = bool(order.first)  # whether short prompts begin before others that wait
        self._max_chunk = budget if order.max_chunk is None else order.max_chunk
        self._passed = {*passed, *[entries[name] for name in order.passed]} if order.passed else passed
        self._first = deque([entries[name] for name in order.first])  # that wait, before all others that do
        self._choose_running()
        if not self.preempted:
            self._choose_waiting()

    def _choose_running(self) -> None:
        state, running, passed, index = self._state, self._state.running, self._passed, 0
        while index < len(running) and self._budget > 0:
            entry = running[index]
            num_tokens = min(entry.tokens - entry.computed, self._max_chunk, self._budget)
            if num_tokens == 0 or (passed and entry in passed):
                index += 1
                continue
            missing = entry.computed + num_tokens - entry.room
            if missing > 0:
                blocks = -(-missing // state.block_size)
                while blocks > state.free:
                    victim = state.victim()
                    self._preempt(victim)
                    if victim == index:
                        return
                    index -= victim < index
                state.take(entry, blocks)
            self._put(entry, num_tokens)
            index += 1

    def _choose_waiting(self) -> None:
        state, skipped = self._state, list[Entry]()
        while self._budget > 0 and (queue := state.next_queue()) is not None:
            overtakes = self._first and queue is state.waiting
            entry = self._first.popleft() if overtakes else queue.head()
            if entry.stale:  # its last token is still on its way
                if not overtakes:
                    skipped.append(queue.pop())
                continue
            if state.blocks_to_begin(entry) > state.free:
                break
            queue.take(entry)
            num_tokens = min(entry.tokens - entry.computed, self._max_chunk, self._budget)
            self.swapped_in += state.begin(entry, num_tokens)
            self.admitted.append(entry)
            self._put(entry, num_tokens)
        for entry in reversed(skipped):
            state.waiting.prepend(entry)

    def _put(self, entry: Entry, num_tokens: int) -> None:
        self.tokens[entry] = num_tokens
        self._budget -= num_tokens

    def _preempt(self, index: int) -> None:
        entry = self._state.preempt(index)
        self._budget += self.tokens.pop(entry, 0)
        self.swapped_out += entry.host_blocks
        self.preempted.append(entry)


def _overtaking(state: FastState, budget: int, passed: Collection[Entry]) -> tuple[Overtaking, dict[str, Entry]]:
    """Which prompts overtake, as `replicas/engine/scheduling/short_prompts.py` asks; requests by their ids."""
    slots = max(0, state.capacity.max_num_seqs - len(state.running))
    holding = list(islice(state.holding, slots))
    new = list(islice(state.waiting, slots - len(holding)))
    begun = [entry for entry in chain(state.running, holding) if entry not in passed]
    reading = [entry for entry in begun if entry.tokens - entry.computed > 1]
    step_tokens = state.options.max_num_batched_tokens
    if not is_any_long([e.tokens - e.computed for e in reading], [e.tokens - e.computed for e in new], step_tokens):
        return IN_ORDER, {}
    size, by_priority = state.block_size, state.options.policy == "priority"
    prompts = [
        Prompt(
            request_id=entry.live.arrival.request_id,
            num_tokens=entry.tokens - entry.computed,
            num_blocks=blocks_for(entry.tokens, size) - blocks_for(entry.computed, size),
            is_running=index < len(reading),
            band=entry.order[0] if by_priority else 0,
        )
        for index, entry in enumerate(chain(reading, new))
    ]
    order = plan_overtaking(
        prompts, len(begun) - len(reading), budget, state.free - state.watermark_blocks, step_tokens
    )
    return order, {entry.live.arrival.request_id: entry for entry in chain(reading, new)}


def draft_ahead(state: FastState, formation: Formation, in_flight_s: Sequence[float]) -> Draft:
    """The next microbatch of a pipeline: what the lookahead planner wants, in its order; the others are passed over."""
    running, before = state.running, list(state.running)
    num_slots = max(0, state.capacity.max_num_seqs - len(before))
    waiting = islice(chain(state.holding, state.waiting), num_slots)
    budget = formation.budget(before, waiting, in_flight_s)
    here = {entry.live.arrival.request_id: entry for entry in before}
    chosen = dict.fromkeys([here[request_id] for request_id in budget if request_id in here])
    passed = [entry for entry in before if entry not in chosen]
    running[:] = [*chosen, *passed]
    draft = Draft(state, max(1, sum(budget.values())), set(passed))
    # As they were, without those that were preempted; then those that began.
    left, known = set(running), set(before)
    running[:] = [entry for entry in before if entry in left] + [entry for entry in running if entry not in known]
    return draft
