"""The one place that reaches into a vLLM scheduler, for lanes and for the simulator.

vLLM's `Scheduler` decides which requests run. A lane needs more than its public calls: requests that come with their
KV, blocks that are withheld, requests that a step must leave out. tests/replicas/engine/test_scheduler_handle.py calls
each method over a real scheduler, so that an upgrade that moves a name fails there.

Requests of a scheduler are in one of these queues:

    running              hold KV, and are in the batch
    kv_holding_waiting   hold KV, and join the batch as soon as there is a slot ("holding" below)
    waiting              hold none
"""

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from pengserve.planners.types.ages import ages_told
from pengserve.replicas.engine.scheduling.block_groups import blocks_of
from pengserve.replicas.engine.scheduling.departures import Departures
from pengserve.replicas.engine.scheduling.ended_answers import EndedAnswers
from pengserve.replicas.engine.scheduling.scheduler_blocks import SchedulerBlocks
from pengserve.replicas.engine.vllm_seam import (
    EngineCoreEventType,
    EngineCoreOutputs,
    GrammarOutput,
    PauseState,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulingPolicy,
)

FIRST_OF_ALL_S = 1e15  # before all times of arrival; floats of this size still count single seconds


def is_prefilling(request: Request) -> bool:
    """Whether tokens of its prompt, or of what it lost, are to be computed: in a step of decoding one is missing."""
    return bool(request.num_tokens - request.num_computed_tokens > 1)


class SchedulerHandle(SchedulerBlocks):
    """A vLLM scheduler and its block pool. Belongs to the thread that steps."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self.departures = Departures()  # of the rules that stand over it
        self.ended = EndedAnswers(scheduler)
        self._max_new: int | None = None  # while a step is limited to so many

    # Requests --------------------------------------------------------------------------------------------------------

    def add(self, request: Request, *, first: bool = False) -> None:
        """Queues a request; `first`: before all others that wait."""
        self._scheduler.add_request(request)
        if first:
            self._scheduler.waiting.remove_request(request)
            self._scheduler.waiting.prepend_request(request)

    def reorder(self, orders: Mapping[str, tuple[int, float]]) -> None:
        """Gives requests here another `(priority, arrival_time)`; ids of others are left alone.

        Queues by priority are sorted anew. A queue by arrival stays as it is.
        """
        found = [(self._scheduler.requests[i], order) for i, order in orders.items() if i in self._scheduler.requests]
        for request, (priority, arrival_time) in found:
            request.priority, request.arrival_time = priority, arrival_time
        if not found or not self.goes_by_priority:
            return
        for queue in (self._scheduler.waiting, self._scheduler.kv_holding_waiting):
            requests = list(queue)  # a heap whose keys have changed still has them all
            queue.remove_requests(requests)
            for request in requests:
                queue.add_request(request)

    def end(self, request_ids: Iterable[str]) -> None:
        """Ends requests as aborted; unknown ids are left alone. Their blocks are free at once."""
        self._scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)

    def take_finished(self, request_ids: Iterable[str]) -> set[str]:
        """Those of these ids that the next step would tell the runner are over; the caller tells it, at once.

        They may come again then. Others stay: a step in flight may be about one of them.
        """
        ids = set(request_ids)
        finished: set[str] = self._scheduler.finished_req_ids & ids
        self._scheduler.finished_req_ids = self._scheduler.finished_req_ids - finished
        self._scheduler.prev_step_scheduled_req_ids.difference_update(ids)
        return finished

    def bring_all_tokens(self) -> None:
        """The runner's batch is empty: the next step is to bring the tokens of each request in it."""
        self._scheduler.prev_step_scheduled_req_ids.clear()

    def knows(self, request_id: str) -> bool:
        """Whether a request is here and has not finished."""
        return request_id in self._scheduler.requests

    def request(self, request_id: str) -> Request:
        """A request that is here. Raises KeyError where it is not."""
        found: Request = self._scheduler.requests[request_id]
        return found

    def requests(self) -> list[Request]:
        """All requests, running ones first, in the order in which the scheduler serves them."""
        others = [r for r in self._scheduler.requests.values() if r.status is not RequestStatus.RUNNING]
        return [*self._scheduler.running, *others]

    @property
    def running(self) -> list[Request]:
        """Requests in the batch, in the order in which they are scheduled. vLLM's own list: do not change it."""
        running: list[Request] = self._scheduler.running
        return running

    @property
    def holding(self) -> Any:
        """Requests that hold KV and wait for a slot in the batch: vLLM's queue."""
        return self._scheduler.kv_holding_waiting

    @property
    def waiting(self) -> Any:
        """Requests that hold no KV, the next one first: vLLM's queue."""
        return self._scheduler.waiting

    @property
    def next_waiting(self) -> Request:
        """The first request that holds no KV. Raises IndexError where there is none."""
        found: Request = self._scheduler.waiting.peek_request()
        return found

    def counts(self) -> tuple[int, int]:
        """Running and waiting requests; those that hold KV without a slot count as waiting."""
        running, waiting = self._scheduler.get_request_counts()
        return int(running), int(waiting)

    def queued_tokens(self) -> int:
        """Tokens of all requests that hold no KV."""
        return sum(request.num_tokens for request in self._scheduler.waiting)

    def queued(self) -> dict[str, int]:
        """What is known of requests that hold no KV, by names in `InstanceStats`."""
        answers = [count for request in self._scheduler.waiting if (count := request.num_output_tokens)]
        return {
            "queued_tokens": self.queued_tokens(),
            "num_preempted": len(answers),
            "preempted_tokens": sum(answers),
        }

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a request that is not here whose KV is in the prefix cache now; none of it is touched."""
        return self.cached_prefix(request)[0]

    def cached_prefix(self, request: Request) -> tuple[int, list[int]]:
        """Of a request that holds no KV: tokens that are in the prefix cache now, and those of their blocks that other
        requests hold. Nothing is touched.
        """
        found, num_tokens = self._manager.get_computed_blocks(request)[:2]
        return int(num_tokens), [block.block_id for block in blocks_of(found.blocks) if block.ref_cnt]

    def shared_blocks(self, request_id: str) -> list[int]:
        """Blocks of a request that other requests hold too."""
        held = blocks_of(self._manager.get_blocks(request_id).blocks)
        return [block.block_id for block in held if block.ref_cnt > 1]

    def prefilling_tokens(self) -> int:
        """Tokens of running requests that no step has computed yet: a step under way has not. The one token of a decode
        does not count.
        """
        running = self._scheduler.running
        left = [r.num_tokens - r.num_computed_tokens + r.num_in_flight_tokens for r in running]
        return sum([count for count in left if count > 1])

    def ages(self) -> dict[str, int]:
        """How many tokens of their answers some running requests have, by names in `InstanceStats`."""
        return ages_told(self.running, attrgetter("num_output_tokens"))

    @property
    def has_requests(self) -> bool:
        """Whether a request is here, or has ended and the runner does not know yet."""
        return bool(self._scheduler.has_requests())

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is here."""
        return bool(self._scheduler.has_unfinished_requests())

    def pause_new(self, paused: bool) -> None:
        """While paused, no waiting request begins; what runs goes on."""
        self._scheduler.set_pause_state(PauseState.PAUSED_NEW if paused else PauseState.UNPAUSED)

    @property
    def takes_new(self) -> bool:
        """Whether waiting requests may begin; see `pause_new`."""
        return bool(self._scheduler.pause_state is PauseState.UNPAUSED)

    # Requests that come with their KV --------------------------------------------------------------------------------

    def reserve(self, request: Request, num_computed_tokens: int) -> list[int] | None:
        """Takes a request whose KV is to come; its block ids, or None where there is no room (nothing has changed).

        It is not scheduled before `enqueue`; its KV must be in the blocks by then.
        """
        # One token more than computed, so that its next step can never wait for a block.
        num_tokens = max(num_computed_tokens, min(request.num_tokens, num_computed_tokens + 1))
        found = self._manager.allocate_slots(request, num_tokens, delay_cache_blocks=True, has_scheduled_reqs=False)
        if found is None:
            return None
        request.num_computed_tokens = num_computed_tokens
        self._scheduler.requests[request.request_id] = request
        return self.block_ids(request.request_id)

    def reserve_cached(self, request: Request, num_tokens: int, num_computed_tokens: int) -> int | None:
        """As `reserve`, for so many tokens, and shares the full blocks that the prefix cache has.

        Returns how many of the first `num_computed_tokens` tokens these hold, or None where there is no room.
        """
        blocks, num_cached, _ = self._manager.get_computed_blocks(request)
        num_cached = min(num_cached, num_computed_tokens)
        num_cached -= num_cached % int(self._scheduler.block_size)
        blocks = self._manager.truncate_computed_blocks(blocks, num_cached)
        found = self._manager.allocate_slots(
            request, num_tokens - num_cached, num_cached, blocks, delay_cache_blocks=True, has_scheduled_reqs=False
        )
        if found is None:
            return None
        request.num_computed_tokens = num_tokens
        self._scheduler.requests[request.request_id] = request
        return num_cached

    def enqueue(self, request: Request) -> None:
        """A reserved request may be scheduled, before all that hold no KV."""
        self._scheduler._enqueue_waiting_request(request)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Gives a reserved request blocks for so many tokens in all; whether there was room."""
        missing = num_tokens - request.num_computed_tokens
        if missing <= 0:
            return True
        found = self._manager.allocate_slots(request, missing, delay_cache_blocks=True, has_scheduled_reqs=False)
        return found is not None

    def hold(self, request: Request) -> None:
        """No step takes a running request any more, until `enqueue`. Its blocks stay its own."""
        self._scheduler.running.remove(request)
        request.status = RequestStatus.PREEMPTED

    def withdraw(self, request: Request) -> None:
        """A request that waits, with its KV or without, is held; see `hold`."""
        (self.holding if request.num_computed_tokens else self.waiting).remove_requests([request])

    def cache(self, request: Request) -> None:
        """Its full blocks join the prefix cache: their KV is there."""
        self._manager.cache_blocks(request, request.num_computed_tokens)

    def preempt(self, request: Request) -> None:
        """A held request gives up its KV and waits for all of it to be computed again, before all others that wait."""
        self._manager.free(request)
        request.num_computed_tokens = 0
        request.num_in_flight_tokens = 0  # vLLM would wait for those of a step that has failed
        request.num_preemptions += 1
        request.record_event(EngineCoreEventType.PREEMPTED)
        self._scheduler.waiting.prepend_request(request)

    def give_way(self, request: Request) -> None:
        """A running request gives up its KV and waits for all of it to be computed again, before all others that wait.

        As vLLM preempts: steps that are under way bring its tokens, and the next step's output names it.
        """
        self._scheduler.running.remove(request)
        self._scheduler._preempt_request(request, time.monotonic())

    def give_up_one(self) -> Request | None:
        """Where requests that came with their KV leave no block for any of them, one gives up its own and waits.

        Call it after a step that scheduled nothing. None where that was not the reason.
        """
        if not self.holding or self._scheduler.running:
            return None
        request: Request = self.holding.pop_request()
        self._manager.free(request)
        request.num_computed_tokens = 0
        self._scheduler.waiting.prepend_request(request)
        return request

    # Steps -----------------------------------------------------------------------------------------------------------

    def end_at(self, max_model_len: int) -> None:
        """Requests end with so many tokens at the latest."""
        self._scheduler.max_model_len = min(self._scheduler.max_model_len, max_model_len)

    def schedule(self) -> SchedulerOutput:
        """vLLM's next step."""
        output: SchedulerOutput = self._scheduler.schedule()
        return output

    @property
    def max_step_tokens(self) -> int:
        """Tokens that vLLM puts into a step at most."""
        return int(self._scheduler.max_num_scheduled_tokens)

    @property
    def goes_by_priority(self) -> bool:
        """Whether requests begin by their priority, and not as they come."""
        return bool(self._scheduler.policy is SchedulingPolicy.PRIORITY)

    @property
    def max_running(self) -> int:
        """Requests that may be in the batch at once."""
        return int(self._scheduler.max_num_running_reqs)

    def candidates(self) -> list[Request]:
        """Requests that the next step may take, in vLLM's order: as many that wait as there are slots and may begin."""
        running = self._scheduler.running
        num_slots = max(0, self.max_running - len(running))
        new = itertools.islice(self._scheduler.waiting, self.new_slots)
        return [*running, *itertools.islice((*self.holding, *new), num_slots)]

    def schedule_only(self, budget: Mapping[str, int]) -> SchedulerOutput:
        """A step of these requests, in this order, with so many tokens each; only the last may get fewer.

        It is said in vLLM's own terms: vLLM passes over a running request whose last token is on its way, until a step
        that it names. The order of the batch and the limit of tokens are vLLM's again afterwards.
        """
        scheduler, limit = self._scheduler, self._scheduler.max_num_scheduled_tokens
        running: list[Request] = scheduler.running
        order = {request.request_id: index for index, request in enumerate(running)}
        place = {request_id: index for index, request_id in enumerate(budget)}
        with self.passing_over([request for request in running if request.request_id not in place]):
            running.sort(key=lambda request: place.get(request.request_id, len(place)))
            scheduler.max_num_scheduled_tokens = max(1, sum(budget.values()))
            try:
                return self.schedule()
            finally:
                scheduler.max_num_scheduled_tokens = limit
                scheduler.running.sort(key=lambda request: order.get(request.request_id, len(order)))

    def decode_first(self) -> None:
        """In the next steps the batch's requests that decode come before those that read a prompt, these by priority.

        vLLM gives out a step's tokens in the order of the batch: where they are few, one that came late would get none.
        """
        self._scheduler.running.sort(key=lambda request: (is_prefilling(request), request.priority))

    @contextlib.contextmanager
    def passing_over(self, requests: Sequence[Request]) -> Iterator[None]:
        """Within it a step leaves these running requests out. They keep their places and their KV."""
        for request in requests:
            request.next_decode_eligible_step = self._scheduler.current_step + 2  # `schedule` begins by counting
        try:
            yield
        finally:
            for request in requests:
                request.next_decode_eligible_step = 0

    @contextlib.contextmanager
    def beginning_first(self, requests: Sequence[Request]) -> Iterator[None]:
        """Within it these requests, of the first one's priority, come before all others that wait, in this order.

        Those that do not begin have their old places again afterwards.
        """
        queue, before = self.waiting, () if self.goes_by_priority else tuple(self.waiting)
        times = [request.arrival_time for request in requests]
        queue.remove_requests(set(requests))
        for index, request in reversed(list(enumerate(requests))):
            request.arrival_time = index - FIRST_OF_ALL_S  # a queue by priority goes by it, and has no other front
            queue.prepend_request(request)
        try:
            yield
        finally:
            for request, arrival_time in zip(requests, times, strict=True):
                request.arrival_time = arrival_time
            if any(request.status is not RequestStatus.RUNNING for request in requests):
                self._put_back(before)

    def _put_back(self, before: Sequence[Request]) -> None:
        """What waits is in this order again, behind what is not in it; a queue by priority is sorted anew."""
        places = {request: place for place, request in enumerate(before)}
        self.order_waiting(sorted(self.waiting, key=lambda request: places.get(request, -1)))

    def order_waiting(self, requests: Sequence[Request]) -> None:
        """All that wait and hold no KV are in this order from now on; a queue by priority goes by it and by arrival."""
        queue = self.waiting
        queue.remove_requests(set(requests))
        for request in requests:
            queue.add_request(request)

    @contextlib.contextmanager
    def chunks_of(self, max_chunk: int) -> Iterator[None]:
        """Within it a step computes so many tokens of one request at most."""
        config = self._scheduler.scheduler_config
        before: int = config.long_prefill_token_threshold  # 0: vLLM was given none
        config.long_prefill_token_threshold = min(before, max_chunk) if before else max_chunk
        try:
            yield
        finally:
            config.long_prefill_token_threshold = before

    @contextlib.contextmanager
    def limited(self, *, num_new: int | None = None, max_tokens: int | None = None) -> Iterator[None]:
        """Within it, a step takes so many tokens at most, and so many of the requests that hold no KV. None: as it was.

        Requests that hold KV and wait for a slot ("holding") are not counted. One within another limits further.
        """
        scheduler, outer = self._scheduler, self._max_new
        active, tokens = scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens
        if num_new is not None:
            scheduler.max_num_active_reqs = min(active, len(scheduler.running) + len(self.holding) + num_new)
            self._max_new = num_new if outer is None else min(outer, num_new)
        scheduler.max_num_scheduled_tokens = tokens if max_tokens is None else min(tokens, max_tokens)
        try:
            yield
        finally:
            scheduler.max_num_active_reqs, scheduler.max_num_scheduled_tokens = active, tokens
            self._max_new = outer

    @property
    def new_slots(self) -> int:
        """Requests without KV that the next step may take."""
        slots = max(0, self.max_running - len(self._scheduler.running))
        return slots if self._max_new is None else min(slots, self._max_new)

    def grammar_bitmask(self, output: SchedulerOutput) -> GrammarOutput | None:
        """Which tokens the grammars of a step's requests allow; None where no request has one."""
        found: GrammarOutput | None = self._scheduler.get_grammar_bitmask(output)
        return found

    def update(self, output: SchedulerOutput, result: Any) -> Mapping[int, EngineCoreOutputs]:
        """Takes a step's tokens (a `ModelRunnerOutput`); outputs by client index."""
        outputs: Mapping[int, EngineCoreOutputs] = self._scheduler.update_from_output(output, result)
        return outputs
