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
from collections.abc import Collection, Sequence
from itertools import chain, islice
from typing import NamedTuple

from pengserve.planners.cost_model import Chunk
from pengserve.planners.types.errors import PlanError
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.planners.types.units import blocks_for
from pengserve.simulator.engine.draft import Draft
from pengserve.simulator.engine.formation import Formation
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.queues import Entry, WaitingQueue
from pengserve.simulator.engine.scheduler import Step, check_admitted, check_fits
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import Batch


class _Mixed(NamedTuple):
    """What `finish` must know of a step that is not of decodes alone."""

    tokens: tuple[tuple[Entry, int], ...]  # new ones
    due: tuple[Entry, ...]
    cost_s: float  # by the lookahead's model


class FastScheduler:
    """See the module, and `LaneScheduler` for what each method does."""

    def __init__(self, capacity: KvCapacity, options: SchedulerOptions | None = None) -> None:
        self.capacity = capacity
        self.options = options = options or SchedulerOptions()
        self._block_size = capacity.block_size
        self._watermark_blocks = int(options.watermark * (capacity.num_blocks + 1))  # vLLM counts its null block
        self._num_blocks = self._free = capacity.num_blocks
        self._host_free = options.host_blocks
        by_priority = options.policy == "priority"
        self._waiting, self._holding = WaitingQueue(by_priority), WaitingQueue(by_priority)
        self._running: list[Entry] = []
        self._lives: tuple[LiveRequest, ...] | None = None  # of `_running`, until it changes
        self._entries: dict[LiveRequest, Entry] = {}
        self._num_prefilling = 0  # running requests that do not decode yet
        self._open: list[object] = []  # handles of unfinished steps
        self._totals = [0] * 5
        self._formation = (
            Formation(
                options.lookahead,
                num_stages=options.num_stages,
                max_tokens=options.max_num_batched_tokens,
                max_requests=capacity.max_num_seqs,
            )
            if options.lookahead is not None and options.num_stages > 1
            else None
        )

    # What there is ---------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """See `LaneScheduler`."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """See `LaneScheduler`."""
        return self._free

    @property
    def running(self) -> Sequence[LiveRequest]:
        """See `LaneScheduler`."""
        return [entry.live for entry in chain(self._running, self._holding)]

    @property
    def waiting(self) -> Sequence[LiveRequest]:
        """See `LaneScheduler`."""
        return [entry.live for entry in self._waiting]

    @property
    def queued_tokens(self) -> int:
        """See `LaneScheduler`."""
        return self._waiting.num_tokens

    @property
    def totals(self) -> dict[str, int]:
        """See `LaneScheduler`."""
        steps, prompted, generated, preempted, resumed = self._totals
        return {
            "step": steps,
            "total_prompt_tokens": prompted,
            "total_generated_tokens": generated,
            "total_preemptions": preempted,
            "total_prefix_queries": 0,
            "total_prefix_hits": 0,
            "total_resumed": resumed,
        }

    def computed_tokens(self, request: LiveRequest) -> int:
        """See `LaneScheduler`."""
        entry = self._entries[request]
        return entry.computed - entry.in_flight

    # Requests that come and go ---------------------------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """See `LaneScheduler`."""
        check_fits(request, self.capacity)
        entry = self._entries[request] = Entry(request)
        if request.num_generated:
            self._totals[4] += 1
            self._waiting.prepend(entry)
        else:
            self._waiting.append(entry)

    def admit(self, request: LiveRequest, computed_tokens: int) -> bool:
        """See `LaneScheduler`."""
        check_fits(request, self.capacity)
        check_admitted(request, computed_tokens)
        blocks = blocks_for(min(request.num_tokens, computed_tokens + 1), self._block_size)
        if blocks > self._free:
            return False
        entry = self._entries[request] = Entry(request)
        entry.computed = computed_tokens
        self._take(entry, blocks)
        self._holding.append(entry)
        return True

    def remove(self, requests: Collection[LiveRequest]) -> None:
        """See `LaneScheduler`."""
        gone = {self._entries.pop(request) for request in requests if request in self._entries}
        for entry in gone:
            self._release(entry)
            self._forget_host(entry)
        self._leave([entry for entry in self._running if entry in gone])
        for queue in (self._waiting, self._holding):
            if any(entry in gone for entry in queue):
                queue.remove(gone)

    def resize(self, num_blocks: int) -> bool:
        """See `LaneScheduler`."""
        used = self._num_blocks - self._free
        if num_blocks < used:
            return False
        self._num_blocks, self._free = num_blocks, num_blocks - used
        return True

    # Steps -----------------------------------------------------------------------------------------------------------

    def schedule(self, max_steps: int = 1) -> Step | None:
        """See `LaneScheduler`."""
        if len(self._open) >= self.options.num_stages:
            raise PlanError(f"{len(self._open)} steps are unfinished: finish one, or set num_stages higher")
        step = self._schedule_decodes(max_steps) if self.options.num_stages == 1 else None
        step = step or self._schedule_mixed()
        if step is not None:
            self._open.append(step.handle)
        return step

    def finish(self, step: Step, num_steps: int = 1) -> list[LiveRequest]:
        """See `LaneScheduler`."""
        self._open.remove(step.handle)
        self._totals[0] += num_steps
        if isinstance(step.handle, _Mixed):
            ended = self._finish_mixed(step.handle)
        else:
            ended = self._finish_decodes(step.handle, num_steps)
        for entry in ended:
            del self._entries[entry.live]
            self._release(entry)
            self._forget_host(entry)
        self._leave([entry for entry in ended if entry.is_decoding])
        waited = {entry for entry in ended if not entry.is_decoding}  # preempted while its last token was on its way
        if waited:
            self._waiting.remove(waited)
        return [entry.live for entry in ended]

    # Steps of decodes alone ------------------------------------------------------------------------------------------

    def _schedule_decodes(self, max_steps: int) -> Step | None:
        """Steps in which all that runs decodes; None where the next one is of another kind."""
        running, size = self._running, self._block_size
        count = len(running)
        if not count or self._num_prefilling or count > self.options.max_num_batched_tokens:
            return None
        full = [entry for entry in running if entry.computed == entry.room]
        free = self._free - len(full)
        if free < 0 or (count < self.options.max_num_batched_tokens and self._has_room_for_next(free)):
            return None
        for entry in full:
            entry.blocks += 1
            entry.room += size
        self._free = free
        steps = min(max_steps, min([entry.left for entry in running]))
        if steps > 1 and count * blocks_for(steps, size) > free:
            steps = 1 + bisect_right(range(2, steps + 1), free, key=self._blocks_of_steps)
        if self._lives is None:
            self._lives = tuple([entry.live for entry in running])
        context = sum([entry.computed for entry in running]) + count
        return Step(batch=Batch(count, context), requests=self._lives, due=self._lives, max_steps=steps, handle=running)

    def _blocks_of_steps(self, num_steps: int) -> int:
        """Blocks that decodes need for so many steps, beside those they have."""
        size = self._block_size
        short = [entry.computed + num_steps - entry.room for entry in self._running]
        return sum([-(-tokens // size) for tokens in short if tokens > 0])

    def _finish_decodes(self, entries: list[Entry], num_steps: int) -> list[Entry]:
        size, ended = self._block_size, []
        for entry in entries:
            entry.computed += num_steps
            entry.tokens += num_steps
            entry.left -= num_steps
            entry.live.num_generated += num_steps
            if entry.computed > entry.room:
                self._take(entry, -(-(entry.computed - entry.room) // size))
            if not entry.left:
                ended.append(entry)
        self._totals[2] += num_steps * len(entries)
        return ended

    # All other steps -------------------------------------------------------------------------------------------------

    def _schedule_mixed(self) -> Step | None:
        draft = self._draft()
        if not draft.tokens and draft.preempted:  # those that run made room for others than themselves
            before, draft = draft, self._draft()
            draft.follow(before)
        if not draft.tokens:
            return None
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
        handle = _Mixed(tuple(draft.tokens.items()), tuple(due), self._cost_s(num_decodes, context, chunks))
        return Step(
            batch=Batch(num_decodes, context, tuple(chunks)),
            requests=tuple([entry.live for entry in draft.tokens]),
            due=tuple([entry.live for entry in due]),
            admitted=tuple([entry.live for entry in draft.admitted]),
            preempted=tuple([entry.live for entry in draft.preempted]),
            swap_out_bytes=draft.swapped_out * self.capacity.bytes_per_block,
            swap_in_bytes=draft.swapped_in * self.capacity.bytes_per_block,
            handle=handle,
        )

    def _finish_mixed(self, step: _Mixed) -> list[Entry]:
        for entry, num_tokens in step.tokens:
            entry.in_flight -= num_tokens
            if entry.stale:
                entry.stale -= num_tokens
        ended = []
        for entry in step.due:
            live = entry.live
            if self._entries.get(live) is not entry:
                continue
            if not live.num_generated:
                self._totals[1] += live.arrival.prompt_tokens
            live.num_generated += 1
            entry.tokens += 1
            entry.left -= 1
            self._totals[2] += 1
            if entry.computed:
                if not entry.is_decoding:
                    entry.is_decoding = True
                    self._num_prefilling -= 1
            else:  # preempted meanwhile
                self._waiting.num_tokens += 1
            if not entry.left:
                ended.append(entry)
        if self._formation is not None:
            self._formation.came_back([entry.live.request_id for entry, _ in step.tokens])
        return ended

    def _draft(self) -> Draft:
        """Chooses the next step's requests and gives them their blocks."""
        draft = Draft(self.options.max_num_batched_tokens)
        order = self._look_ahead(draft) if self._formation is not None else None
        self._draft_running(draft)
        if not draft.preempted:
            self._draft_waiting(draft)
        if order is not None:
            self._running.sort(key=lambda entry: order.get(entry, len(order)))
        return draft

    def _draft_running(self, draft: Draft) -> None:
        running, size, index = self._running, self._block_size, 0
        while index < len(running) and draft.budget > 0:
            entry = running[index]
            num_tokens = min(entry.tokens - entry.computed, draft.budget)
            if num_tokens == 0 or (draft.passed and entry in draft.passed):
                index += 1
                continue
            end = entry.computed + num_tokens
            if end > entry.room:
                blocks = -(-(end - entry.room) // size)
                while blocks > self._free:
                    victim, shift = self._preempt_one(draft, index)
                    index -= shift
                    if victim is entry:
                        return
                self._take(entry, blocks)
            draft.tokens[entry] = num_tokens
            draft.budget -= num_tokens
            index += 1

    def _draft_waiting(self, draft: Draft) -> None:
        skipped: list[Entry] = []
        while draft.budget > 0:
            queue = self._holding or self._waiting
            if not queue or len(self._running) >= self.capacity.max_num_seqs:
                break
            entry = queue.head()
            if entry.stale:  # its last token is still on its way
                skipped.append(queue.pop())
                continue
            if self._blocks_to_begin(entry) > self._free:
                break
            queue.pop()
            num_tokens = min(entry.tokens - entry.computed, draft.budget)
            draft.swapped_in += entry.host_blocks
            self._forget_host(entry)
            self._take(entry, max(0, blocks_for(entry.computed + num_tokens, self._block_size) - entry.blocks))
            self._running.append(entry)
            self._lives = None
            self._num_prefilling += 1
            draft.admitted.append(entry)
            draft.tokens[entry] = num_tokens
            draft.budget -= num_tokens
        for entry in reversed(skipped):
            self._waiting.prepend(entry)

    def _look_ahead(self, draft: Draft) -> dict[Entry, int]:
        """Puts what the planner wants into `draft` and to the front; the order as it was."""
        assert self._formation is not None
        running = self._running
        order = {entry: index for index, entry in enumerate(running)}
        num_slots = max(0, self.capacity.max_num_seqs - len(running))
        waiting = islice(chain(self._holding, self._waiting), num_slots)
        in_flight_s = [handle.cost_s for handle in self._open if isinstance(handle, _Mixed)]
        budget = self._formation.budget(running, waiting, in_flight_s)
        place = {request_id: index for index, request_id in enumerate(budget)}
        draft.passed = {entry for entry in running if entry.live.request_id not in place}
        draft.budget = max(1, sum(budget.values()))
        running.sort(key=lambda entry: place.get(entry.live.request_id, len(place)))
        return order

    def _cost_s(self, num_decodes: int, context: int, chunks: Sequence[Chunk]) -> float:
        if self._formation is None:
            return 0.0
        # The model is linear in the prefix of a decode, so that decodes of the same sum cost the same.
        decodes = [Chunk(prefix_tokens=0, num_tokens=1)] * max(0, num_decodes - 1)
        decodes += [Chunk(prefix_tokens=context - num_decodes, num_tokens=1)] * (num_decodes > 0)
        return self._formation.cost_s([*decodes, *chunks])

    # Blocks ----------------------------------------------------------------------------------------------------------

    def _has_room_for_next(self, free: int) -> bool:
        queue = self._holding or self._waiting
        if not queue or len(self._running) >= self.capacity.max_num_seqs:
            return False
        return self._blocks_to_begin(queue.head()) <= free

    def _blocks_to_begin(self, entry: Entry) -> int:
        """Blocks that must be free before a waiting request begins: for all it has, not only for its first chunk."""
        watermark = self._watermark_blocks if self._running else 0
        return max(0, blocks_for(entry.tokens, self._block_size) - entry.blocks) + watermark

    def _preempt_one(self, draft: Draft, index: int) -> tuple[Entry, int]:
        """Takes all memory from a running request; that one, and how far those at `index` and after it have moved."""
        running = self._running
        if self.options.policy == "priority":
            position = running.index(max(running, key=lambda entry: entry.order[:2]))
        else:
            position = len(running) - 1
        victim = running.pop(position)
        self._lives = None
        draft.budget += draft.tokens.pop(victim, 0)
        if not victim.is_decoding:
            self._num_prefilling -= 1
        victim.is_decoding = False
        if self.options.preemption == "swap" and self._swap_out(victim):
            draft.swapped_out += victim.host_blocks
        else:
            victim.computed = 0
        victim.stale = victim.in_flight
        victim.live.num_preemptions += 1
        self._totals[3] += 1
        self._release(victim)
        self._waiting.prepend(victim)
        draft.preempted.append(victim)
        return victim, int(position < index)

    def _swap_out(self, entry: Entry) -> bool:
        """Gives a request's KV a place on the host; False where there is none, or its last step is unfinished."""
        blocks = blocks_for(entry.computed, self._block_size)
        if entry.in_flight or not blocks or (self._host_free is not None and blocks > self._host_free):
            return False
        if self._host_free is not None:
            self._host_free -= blocks
        entry.host_blocks = blocks
        return True

    def _forget_host(self, entry: Entry) -> None:
        if self._host_free is not None:
            self._host_free += entry.host_blocks
        entry.host_blocks = 0

    def _take(self, entry: Entry, blocks: int) -> None:
        assert blocks <= self._free, "a scheduler gave away what it has not"
        entry.blocks += blocks
        entry.room = entry.blocks * self._block_size
        self._free -= blocks

    def _release(self, entry: Entry) -> None:
        self._free += entry.blocks
        entry.blocks = entry.room = 0

    def _leave(self, entries: Collection[Entry]) -> None:
        """Takes requests out of those that run."""
        if not entries:
            return
        self._num_prefilling -= sum(not entry.is_decoding for entry in entries)
        gone = set(entries)
        self._running = [entry for entry in self._running if entry not in gone]
        self._lives = None
        if self._formation is not None:
            for entry in entries:
                self._formation.forget(entry.live.request_id)
