"""A scheduler in plain Python that decides as vLLM 0.32's does, hundreds of times as fast where all that runs decodes.

What is decided the same: running requests first, in their order; then waiting ones, in theirs, while the whole of each
fits; prompts in chunks up to the step's budget; preemption by recompute, of the newest request or of the least urgent;
blocks at the moment they are needed. `tests/simulator/engine/test_equal_decisions.py` holds both to it.

What it does not know: prefix caching (`prefix_ids` are ignored), and with it that a preempted request may find its own
blocks again; speculative decoding; encoders. What vLLM does not know: preemption by swapping to the host.

Steps in which every running request decodes are all alike until one ends, a block is missing, or another may begin;
they are scheduled as one, and cost the same as one.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from pengserve.planners.cost_model import Chunk
from pengserve.planners.late_prompts import LateOrder, Waiting
from pengserve.planners.short_steps import first_step_tokens, meeting_step_tokens
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.planners.types.units import blocks_for
from pengserve.simulator.engine.draft import Draft, draft_ahead
from pengserve.simulator.engine.fast_answers import FastAnswers
from pengserve.simulator.engine.fast_state import FastState
from pengserve.simulator.engine.formation import Formation
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.queues import Entry
from pengserve.simulator.engine.scheduler import SimStep, check_admitted, check_fits
from pengserve.simulator.engine.unfinished import UnfinishedSteps
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import Batch


class _Mixed(NamedTuple):
    """What `finish` must know of a step that is not of decodes alone."""

    tokens: tuple[tuple[Entry, int], ...]  # new ones
    due: tuple[Entry, ...]
    cost_s: float  # by the lookahead's model


class FastScheduler:
    """A `LaneScheduler` in plain Python, without prefix caching. Equal decode steps are scheduled as one."""

    def __init__(
        self,
        capacity: KvCapacity,
        options: SchedulerOptions | None = None,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`clock`: seconds, by which prompts are late."""
        self.capacity, self._clock, self._lates = capacity, clock, LateOrder()
        self.options = options = options or SchedulerOptions()
        self._state = FastState(capacity, options)
        self._answers = (
            FastAnswers(self._state, options.long_answers, clock) if options.long_answers is not None else None
        )
        self._begun_short = ""  # whose first step was kept short last
        self._is_meeting = False
        self._unfinished: UnfinishedSteps[Any] = UnfinishedSteps(options.most_in_flight)
        self._steps = self._prompted = self._generated = self._resumed = 0
        self._formation = (
            Formation(
                options.lookahead,
                max_in_flight=options.most_in_flight,
                max_tokens=options.max_num_batched_tokens,
                max_requests=capacity.max_num_seqs,
            )
            if options.lookahead is not None and options.num_stages > 1
            else None
        )

    # What there is ---------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """KV blocks that the lane has now."""
        return self._state.num_blocks

    @property
    def num_free(self) -> int:
        """KV blocks that are free now."""
        return self._state.free

    @property
    def running(self) -> Sequence[LiveRequest]:
        """Requests that hold KV, in the order in which they are scheduled."""
        return self._state.holders()

    @property
    def waiting(self) -> Sequence[LiveRequest]:
        """Requests that hold no KV, the next one first."""
        return [entry.live for entry in self._state.waiting]

    @property
    def queued_tokens(self) -> int:
        """Tokens of all waiting requests."""
        return self._state.waiting.num_tokens

    @property
    def prefilling_tokens(self) -> int:
        """Tokens of running requests that no step has computed yet, without decodes."""
        state = self._state
        if not state.num_prefilling:
            return 0
        return sum(e.tokens - e.computed + e.in_flight for e in state.running if not e.is_decoding)

    @property
    def totals(self) -> dict[str, int]:
        """Counts that only grow, by their names in `InstanceStats`; those of prefix caching are 0."""
        return {
            "step": self._steps,
            "total_prompt_tokens": self._prompted,
            "total_generated_tokens": self._generated,
            "total_preemptions": self._state.num_preempted,
            "total_prefix_queries": 0,
            "total_prefix_hits": 0,
            "total_resumed": self._resumed,
        }

    def computed_tokens(self, request: LiveRequest) -> int:
        """Tokens of a running request whose KV is there, without those of unfinished steps."""
        entry = self._state.entries[request]
        return entry.computed - entry.in_flight

    def cached_tokens(self, request: LiveRequest) -> int:
        """None: it finds no prefixes."""
        return 0

    def blocks_freed(self, requests: Sequence[LiveRequest]) -> list[tuple[int, list[int]]]:
        """Of each running request, the number of blocks that it holds; no block is shared, so the lists are empty."""
        return [(self._state.entries[request].blocks, []) for request in requests]

    # Requests that come and go ---------------------------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Queues a request, before all others if it has generated tokens. Raises PlanError if it is too long."""
        check_fits(request, self.capacity)
        entry = self._state.entries[request] = Entry(request)
        if request.num_generated:
            self._resumed += 1
            self._state.waiting.prepend(entry)
        else:
            self._state.waiting.append(entry)

    def admit(self, request: LiveRequest, computed_tokens: int) -> bool:
        """Takes a request with KV of `computed_tokens`; False, and nothing is changed, where blocks are missing."""
        check_fits(request, self.capacity)
        check_admitted(request, computed_tokens)
        # One token more than computed, as in production, so that its next step can never wait for a block.
        blocks = blocks_for(computed_tokens + 1, self.capacity.block_size)
        if blocks > self._state.free:
            return False
        entry = self._state.entries[request] = Entry(request)
        entry.computed, entry.preemptions = computed_tokens, 1
        self._state.take(entry, blocks)
        self._state.holding.append(entry)
        return True

    def remove(self, requests: Collection[LiveRequest]) -> None:
        """Lets requests go, running or waiting, and frees their blocks; unknown requests are ignored."""
        entries = self._state.entries
        self._let_go([entries[request] for request in requests if request in entries])

    def resize(self, num_blocks: int) -> bool:
        """Sets the number of KV blocks; False, and nothing is changed, where more are in use."""
        return self._state.resize(num_blocks)

    # Steps -----------------------------------------------------------------------------------------------------------

    def keep_steps_short(self, is_on: bool) -> None:
        """Whether all steps from now on read little of prompts."""
        self._is_meeting = is_on

    def schedule(self, max_steps: int = 1) -> SimStep | None:
        """The next step, or up to `max_steps` equal ones as one; None where there is nothing to compute now."""
        self._unfinished.require_room()
        step = self._schedule_decodes(max_steps) if self.options.num_stages == 1 else None
        step = step or self._schedule_mixed()
        if step is not None:
            self._unfinished.begin(step.handle)
        return step

    def finish(self, step: SimStep, num_steps: int = 1) -> list[LiveRequest]:
        """Ends `num_steps` of the oldest unfinished step, counts their tokens, and returns the requests that ended."""
        handle = self._unfinished.finish(step.handle)
        self._steps += num_steps
        ended = self._finish_mixed(handle) if isinstance(handle, _Mixed) else self._finish_decodes(handle, num_steps)
        self._let_go(ended)
        return [entry.live for entry in ended]

    def _hurry(self) -> None:
        """As `replicas/engine/scheduling/late_prompts.py`."""
        queue, lates, now_s = self._state.waiting, self._lates, self._clock()
        if not (self.options.late_prompts and queue) or not lates.is_due(now_s, _gone(queue.head(), now_s)):
            return
        entries, by_priority = list(queue), self.options.policy == "priority"
        waiting = [Waiting(e.order[2], _gone(e, now_s), e.order[1], e.order[0], e.has_begun) for e in entries]
        places = lates.order(waiting, by_priority=by_priority)
        if by_priority:
            for place in places:
                entry = entries[place.at]
                entry.order = entry.order[0], place.time_s, entry.order[2]
        queue.order([entries[place.at] for place in places])
        lates.rest(now_s)

    def _let_go(self, entries: Collection[Entry]) -> None:
        self._state.let_go(entries)
        if self._formation is not None:
            for entry in entries:
                self._formation.forget(entry.live.request_id)

    # Steps of decodes alone ------------------------------------------------------------------------------------------

    def _schedule_decodes(self, max_steps: int) -> SimStep | None:
        """Steps in which all that runs decodes; None where the next one is of another kind."""
        state, running, size = self._state, self._state.running, self.capacity.block_size
        count = len(running)
        if not count or state.num_prefilling or count > self.options.max_num_batched_tokens:
            return None
        if self._answers is not None and (max_steps := int(min(max_steps, self._answers.calm_steps()))) < 1:
            return None
        self._hurry()
        full = [entry for entry in running if entry.computed == entry.room]
        free = state.free - len(full)
        if free < 0 or (count < self.options.max_num_batched_tokens and self._can_begin(free)):
            return None
        for entry in full:
            state.take(entry, 1)
        steps = min(max_steps, min([entry.left for entry in running]))
        if steps > 1 and count * blocks_for(steps, size) > free:
            steps = 1 + bisect_right(range(2, steps + 1), free, key=self._blocks_of_steps)
        context = sum([entry.computed for entry in running]) + count
        lives = state.lives
        return SimStep(batch=Batch(count, context), requests=lives, due=lives, max_steps=steps, handle=running)

    def _can_begin(self, free: int) -> bool:
        queue = self._state.next_queue()
        return queue is not None and self._state.blocks_to_begin(queue.head()) <= free

    def _blocks_of_steps(self, num_steps: int) -> int:
        """Blocks that decodes need for so many steps, beside those they have."""
        size = self.capacity.block_size
        short = [entry.computed + num_steps - entry.room for entry in self._state.running]
        return sum([-(-tokens // size) for tokens in short if tokens > 0])

    def _finish_decodes(self, entries: list[Entry], num_steps: int) -> list[Entry]:
        size, ended = self.capacity.block_size, []
        for entry in entries:
            entry.computed += num_steps
            entry.tokens += num_steps
            entry.left -= num_steps
            entry.live.num_generated += num_steps
            if entry.computed > entry.room:
                self._state.take(entry, -(-(entry.computed - entry.room) // size))
            if not entry.left:
                ended.append(entry)
        self._generated += num_steps * len(entries)
        return ended

    # All other steps -------------------------------------------------------------------------------------------------

    def _schedule_mixed(self) -> SimStep | None:
        draft, preempted = self._form()
        swapped_out, made_room = draft.swapped_out, bool(preempted)
        while not draft.tokens:
            # Either those that ran have made room for others than themselves, or nothing ran at all.
            given_up = [] if made_room else self._state.give_up()
            if not (made_room or given_up):
                return None
            draft, more = self._form()
            made_room, preempted = bool(more), preempted + given_up + more
            swapped_out += draft.swapped_out
        chunks: list[Chunk] = []
        num_decodes = context = 0
        due = []
        for entry, num_tokens in draft.tokens.items():
            if num_tokens == 1 and entry.live.num_generated:
                num_decodes += 1
                context += entry.computed + 1
            else:
                chunks.append(Chunk(prefix_tokens=entry.computed, num_tokens=num_tokens))
            entry.computed += num_tokens
            entry.in_flight += num_tokens
            if entry.computed == entry.tokens:
                due.append(entry)
        return SimStep(
            batch=Batch(num_decodes, context, tuple(chunks)),
            requests=tuple([entry.live for entry in draft.tokens]),
            due=tuple([entry.live for entry in due]),
            admitted=tuple([entry.live for entry in draft.admitted]),
            preempted=tuple([entry.live for entry in preempted]),
            swap_out_bytes=swapped_out * self.capacity.bytes_per_block,
            swap_in_bytes=draft.swapped_in * self.capacity.bytes_per_block,
            handle=_Mixed(
                tuple(draft.tokens.items()), tuple(due), self._cost_s(num_decodes, context, chunks, draft.overtakes)
            ),
        )

    def _form(self) -> tuple[Draft, list[Entry]]:
        """The next step, and all that was preempted for it."""
        if self._answers is None or (answers := self._answers.stepping()) is None:
            self._hurry()
            draft = self._draft()
            return draft, draft.preempted
        with answers:
            self._hurry()
            draft = self._draft()
        gave_way, self._answers.preempted = self._answers.preempted, []
        return draft, gave_way + draft.preempted

    def _draft(self) -> Draft:
        if self._formation is None:
            return Draft(self._state, self._short_step_tokens() or self.options.max_num_batched_tokens)
        in_flight_s = [handle.cost_s for handle in self._unfinished if isinstance(handle, _Mixed)]
        return draft_ahead(self._state, self._formation, in_flight_s)

    def _short_step_tokens(self) -> int | None:
        """As `replicas/engine/scheduling/short_steps.py`; None: the next step need not be short."""
        state = self._state
        if self._is_meeting:
            state.decode_first()
            return meeting_step_tokens(len(state.running), self.options.max_num_batched_tokens)
        if not self.options.short_first_steps or state.running or state.holding or len(state.waiting) != 1:
            return None
        entry = state.waiting.head()
        most = first_step_tokens(entry.tokens - entry.computed, self.options.max_num_batched_tokens)
        if most is None or entry.live.request_id == self._begun_short:
            return None
        self._begun_short = entry.live.request_id
        return most

    def _cost_s(self, num_decodes: int, context: int, chunks: Sequence[Chunk], overtakes: bool) -> float:
        """Where short prompts overtook, at least what the microbatch was to cost, as in production."""
        if self._formation is None:
            return 0.0
        # The model is linear in the prefix of a decode, so that decodes of the same sum cost the same.
        decodes = [Chunk(prefix_tokens=0, num_tokens=1)] * max(0, num_decodes - 1)
        decodes += [Chunk(prefix_tokens=context - num_decodes, num_tokens=1)] * (num_decodes > 0)
        cost_s = self._formation.cost_s([*decodes, *chunks])
        return max(cost_s, self._formation.planned_s()) if overtakes else cost_s

    def _finish_mixed(self, step: _Mixed) -> list[Entry]:
        state, ended = self._state, []
        for entry, num_tokens in step.tokens:
            entry.in_flight -= num_tokens
            if entry.stale:
                entry.stale -= num_tokens
        for entry in step.due:
            live = entry.live
            if state.entries.get(live) is not entry:
                continue
            if not live.num_generated:
                self._prompted += live.arrival.prompt_tokens
            live.num_generated += 1
            entry.tokens += 1
            entry.left -= 1
            self._generated += 1
            if not entry.computed:  # preempted while its token was on its way
                state.waiting.num_tokens += 1
            elif not entry.is_decoding:
                entry.is_decoding = True
                state.num_prefilling -= 1
            if not entry.left:
                ended.append(entry)
        if self._formation is not None:
            self._formation.came_back([entry.live.request_id for entry, _ in step.tokens])
        return ended


def _gone(entry: Entry, now_s: float) -> float:
    return 0.0 if entry.has_begun else entry.live.gone(now_s)
