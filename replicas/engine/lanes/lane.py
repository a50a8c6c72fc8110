"""What every lane is: one vLLM scheduler and one runner over the instance's one set of weights and KV memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

from pengserve.planners.types.snapshot import InstanceStats, KvCapacity
from pengserve.replicas.engine.lanes.handoff import can_carry
from pengserve.replicas.engine.lanes.kv_shares import LaneKv
from pengserve.replicas.engine.lanes.lane_totals import LaneTotals
from pengserve.replicas.engine.placement.early_offload import EarlyOffload
from pengserve.replicas.engine.placement.placement_notes import PlacementNotes
from pengserve.replicas.engine.placement.slo_gate import Contracts, SloGate
from pengserve.replicas.engine.placement.slo_placement import SloPlacement
from pengserve.replicas.engine.scheduling.chunk_shares import ChunkShares
from pengserve.replicas.engine.scheduling.departures import Departures
from pengserve.replicas.engine.scheduling.late_prompts import LatePrompts
from pengserve.replicas.engine.scheduling.long_answers import LongAnswers
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle, is_prefilling
from pengserve.replicas.engine.scheduling.short_prompts import ShortPrompts
from pengserve.replicas.engine.scheduling.short_steps import ShortSteps
from pengserve.replicas.engine.tiers.residency import ResidentRequests
from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs, Request, RequestStatus
from pengserve.replicas.memory.kv_views import KvView
from pengserve.replicas.memory.layers import LayerMemory

NOTHING: Mapping[str, int] = MappingProxyType({})
FREE: AbstractContextManager[None] = nullcontext()  # around a step that may choose from all requests


class Lane(ABC):
    """Requests in, tokens out. Belongs to the thread that steps; all members of a group have one of the same shape."""

    _slo_gate: SloGate | None = None  # where contracts are known, and this member schedules
    _lates: LatePrompts | None = None  # ...
    _answers: LongAnswers | None = None  # ... and KV is on the device alone
    _slo_placement: SloPlacement | None = None  # ... and KV is on device and host, layer by layer
    _short_steps: ShortSteps | None = None  # where this member schedules

    def __init__(
        self, *, shape: str, capacity: KvCapacity, scheduler: Any, block_hasher: Any, begins_short: bool = False
    ) -> None:
        """
        Args:
            scheduler: None on a follower, which executes what another member's scheduler decides.
            begins_short: the first step after an idle time is short, where a prompt is longer than a step.
        """
        self.shape, self.capacity = shape, capacity
        self._block_hasher = block_hasher
        self._handle = SchedulerHandle(scheduler) if scheduler is not None else None
        self._totals = LaneTotals(departures=self._handle.departures if self._handle is not None else Departures())
        self._chunks = ChunkShares(self._handle) if self._handle is not None else None
        if self._handle is not None:
            self._short_steps = ShortSteps(self._handle, begins_short=begins_short)
        self._shorts = (
            ShortPrompts(self._handle, capacity.block_size, self.num_available) if self._handle is not None else None
        )
        self._queued: tuple[tuple[int, ...], Mapping[str, int]] = ((), NOTHING)
        self._added = 0
        self.residency: ResidentRequests | None = None  # where KV has a host tier, and this member schedules

    @property
    def leads(self) -> bool:
        """Whether this member schedules the lane's steps."""
        return self._handle is not None

    @property
    def scheduler(self) -> SchedulerHandle:
        """The lane's scheduler; only a member that leads has it."""
        assert self._handle is not None, "a follower schedules nothing"
        return self._handle

    # What a lane of each kind does in its own way --------------------------------------------------------------------

    @abstractmethod
    def step(self) -> Mapping[int, EngineCoreOutputs]:
        """Schedules, executes and samples one step; outputs by client index."""

    @abstractmethod
    def adopt(self, request: Request) -> None:
        """Makes the runner (each member's) know a half-decoded request as one that it had preempted itself."""

    @abstractmethod
    def forget(self, request_ids: Iterable[str]) -> None:
        """Makes the runner (each member's) forget requests now, so that they can come back under the same ids."""

    @abstractmethod
    def kv(self, dp_view: KvView) -> LaneKv:
        """What this member has of the lane's KV; `dp_view` is the KV of its `dp` lane."""

    @property
    def num_held(self) -> int:
        """Blocks that this lane may hand out, used or not."""
        return self.capacity.num_blocks

    # Requests --------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Gives a prepared request to the scheduler. One that was running elsewhere goes to the head of the queue."""
        self._added += 1
        self.rehash(request)
        self._note_bands([request.priority])
        self.count_come(request)
        if request.status is not RequestStatus.PREEMPTED:
            self.scheduler.add(request)
            return
        self._totals.resumed += 1
        self.take_over(request)
        self.scheduler.add(request, first=True)

    def count_come(self, request: Request) -> None:
        """Counts a request that an ingress sent here, which may also have gone back at once."""
        self._totals.count_come(request)

    def take_over(self, request: Request) -> None:
        """Makes all members' runners know a half-decoded request before its next step, as `adopt` does one."""
        self.adopt(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forgets requests; unknown ids are left alone. Their blocks are free at once."""
        ids = list(request_ids)
        self._end(ids)
        if self.residency is not None:
            self.residency.forget(ids)  # at once: one that goes on elsewhere may come back under its id

    def _end(self, request_ids: Sequence[str]) -> None:
        self.scheduler.end(request_ids)

    def reorder(self, orders: Mapping[str, tuple[int, float]]) -> None:
        """Gives requests here another `(priority, arrival_time)`; ids of others are left alone."""
        self.scheduler.reorder(orders)
        self._note_bands(band for band, _ in orders.values())
        if self.residency is not None:
            self.residency.unsettle()

    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_requests or (self.residency is not None and self.residency.has_work())

    def num_requests(self) -> int:
        """Running, waiting and parked requests."""
        return sum(self.scheduler.counts()) + self._num_parked()

    def is_parked(self, request: Request) -> bool:
        """Whether an order has parked it: it goes on when another order says so."""
        return self.residency is not None and self.residency.is_ordered(request)

    def _num_parked(self) -> int:
        return self.residency.num_parked() if self.residency is not None else 0

    # SLOs ------------------------------------------------------------------------------------------------------------

    def keep_slos(self, contracts: Contracts, notes: PlacementNotes, *, places: bool) -> None:
        """From now on prompts begin as SLOs allow: of those that decode, and of their own first tokens. For a leader.

        Args:
            places: KV is placed so, too, where there is a host tier.
        """
        self._slo_gate, self._lates = SloGate(self.scheduler, contracts), LatePrompts(self.scheduler, contracts)
        if self.residency is None:
            self._answers = LongAnswers(
                self.scheduler, contracts, self.capacity.block_size, self.num_available, lambda: self.num_held
            )
            return
        if not places:
            return
        early = EarlyOffload(self.scheduler, self.residency, contracts, self._slo_gate.prefill_s)
        self._slo_placement = SloPlacement(self.scheduler, self.residency, contracts, notes, early, shape=self.shape)

    def stop_placing(self) -> None:
        """No KV is placed by SLOs any more."""
        if self._slo_placement is not None:
            self._slo_placement.close()
        self._slo_placement = None

    def _hurrying(self) -> AbstractContextManager[None]:
        """Around all that chooses a step: what may begin in it waits, in the order in which it begins."""
        answers = self._answers.stepping() if self._answers is not None else None
        if answers is not None:
            return self._giving_way(answers)
        self._hurry()
        return FREE

    @contextmanager
    def _giving_way(self, answers: AbstractContextManager[None]) -> Iterator[None]:
        with answers:
            self._hurry()
            yield

    def _hurry(self) -> None:
        """Puts what waits in the order in which it begins."""
        if self._lates is not None:
            self._lates.renew()

    def _gating(self) -> AbstractContextManager[None]:
        """Of the next step, what keeps prompts back that would break another request's SLO."""
        gate = self._slo_gate
        return gate.step() if gate is not None and gate.is_on else FREE

    def _choosing(self) -> AbstractContextManager[None]:
        """Around a step: with a host tier, only what the device can hold is stepped."""
        if self._slo_placement is not None and self._slo_placement.is_on:
            return self._placing(self._slo_placement)
        return self._resident()

    @contextmanager
    def _placing(self, placement: SloPlacement) -> Iterator[None]:
        with placement.step(), self._resident():
            yield

    def _resident(self) -> AbstractContextManager[None]:
        return self.residency.choosing() if self.residency is not None else FREE

    def _chunking(self) -> AbstractContextManager[None]:
        """Around a step, within `_choosing`: which prompts it reads, by their bands, or by their lengths within one.

        Pipelines ask for each microbatch instead (`Microbatches`).
        """
        chunks, shorts = self._chunks, self._shorts
        if chunks is not None and chunks.is_on:
            return chunks.step()
        return shorts.step() if shorts is not None and shorts.is_on else FREE

    def keep_steps_short(self, is_on: bool) -> None:
        """Whether all steps from now on read little of prompts, as members of a switch wait for their end.

        Pipelines read on as they do: their microbatches are short.
        """
        if self._short_steps is not None:
            self._short_steps.keep(is_on)

    def _shortening(self) -> AbstractContextManager[None]:
        """Around a step: where it is kept short, so many tokens at most."""
        return (self._short_steps.limiting() if self._short_steps is not None else None) or FREE

    def _note_bands(self, bands: Iterable[int]) -> None:
        if self._chunks is not None:
            for band in bands:
                self._chunks.note(band)

    def is_reading(self) -> bool:
        """Whether a request waits, or has not computed its prompt."""
        return any(map(is_prefilling, self.requests()))

    def knows(self, request_id: str) -> bool:
        """Whether a request is here and has not finished."""
        return self.scheduler.knows(request_id)

    def request(self, request_id: str) -> Request:
        """A request that is here. Raises KeyError where it is not."""
        return self.scheduler.request(request_id)

    def rehash(self, request: Request) -> None:
        """Hashes a request's blocks in this lane's block size; it may have been prepared for another lane."""
        if request._block_hasher is not self._block_hasher:
            request._block_hasher = self._block_hasher
            request.block_hashes.clear()
            request.update_block_hashes()

    # Requests that come and go with their KV -------------------------------------------------------------------------

    def requests(self) -> list[Request]:
        """All requests, running ones first, in the order the scheduler serves them."""
        return self.scheduler.requests()

    def carriable(self) -> list[Request]:
        """Requests whose KV can move to another lane."""
        return [request for request in self.requests() if can_carry(request)]

    def num_running(self) -> int:
        """Requests that have begun and hold KV."""
        return len(self.scheduler.running) + len(self.scheduler.holding) + self._num_parked()

    def pause_new(self, paused: bool) -> None:
        """While paused, no waiting request begins; what runs goes on."""
        self.scheduler.pause_new(paused)

    def admit(self, request: Request, num_computed_tokens: int) -> list[int] | None:
        """Takes a request whose KV is to come; its block ids, or None where there is no room (nothing has changed).

        The scheduler will go on with it once it is `settle`d; its KV must be in the blocks by then.
        """
        block_ids = self._make_room(request, num_computed_tokens)
        if block_ids is not None:
            self.scheduler.enqueue(request)
        return block_ids

    def _make_room(self, request: Request, num_computed_tokens: int) -> list[int] | None:
        self.rehash(request)
        return self.scheduler.reserve(request, num_computed_tokens)

    def blocks_needed(self, num_computed_tokens: int) -> int:
        """Blocks that `admit` takes for so many computed tokens, at most."""
        return -(-(num_computed_tokens + 1) // self.capacity.block_size)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.capacity.block_size)

    def reserve(self, request: Request, num_tokens: int, num_computed_tokens: int) -> int | None:
        """Gives a request whose KV is to come room for so many tokens; None where there is none.

        Returns how many of its computed tokens, from the first on, the prefix cache has already: their blocks are
        shared, and must not be written. The request is not scheduled before `go_on`. `enlarge` gives it more room.
        """
        self.rehash(request)
        return self.scheduler.reserve_cached(request, num_tokens, num_computed_tokens)

    def enlarge(self, request: Request, num_tokens: int) -> bool:
        """Gives a reserved request room for so many tokens in all; whether there was any."""
        return self.scheduler.grow(request, num_tokens)

    def take_lease(self) -> list[int]:
        """Logical blocks that the other members must back before they hear of them, and have not been told of yet."""
        return []

    def num_written(self, request: Request) -> int:
        """Tokens of a running request whose KV members have once they have made the steps that they were sent."""
        return int(request.num_computed_tokens)

    def num_moves(self, request: Request) -> int:
        """How often a request has lost its blocks so far: while that stays equal, its KV stays where it is."""
        return int(request.num_preemptions)

    def is_between_steps(self, request: Request) -> bool:
        """Whether no step that has begun and not ended is about this request."""
        return True

    def served(self, *, must_leave: bool) -> list[Request]:
        """Requests that run or are parked; those that an order has parked only where they must leave."""
        parked = self.residency.parked if self.residency is not None else []
        return [*self.scheduler.running, *(request for request in parked if must_leave or not self.is_parked(request))]

    def set_aside(self, request: Request) -> None:
        """No step takes a request with KV any more, until `go_on`. Its blocks stay its own."""
        if request.status is RequestStatus.RUNNING:
            self.scheduler.hold(request)
        elif self.residency is None or not self.residency.let_go(request):
            self.scheduler.withdraw(request)

    def go_on(self, request: Request) -> None:
        """A request that was set aside, or whose KV has come, may be scheduled."""
        if self.is_parked(request):
            assert self.residency is not None
            self.residency.keep(request)
        else:
            self.scheduler.enqueue(request)

    def keep_parked(self, request: Request) -> None:
        """A request whose KV has come was parked by an order where it came from, and stays so."""
        if self.residency is not None:
            self.scheduler.withdraw(request)
            self.residency.keep(request, is_ordered=True)

    def settle(self, request: Request) -> None:
        """The KV has come: its full blocks join the prefix cache."""
        self._added += 1
        self.scheduler.cache(request)

    def block_ids(self, request_id: str) -> list[int]:
        """Logical blocks of a request, in the order of its tokens."""
        return self.scheduler.block_ids(request_id)

    def blocks_freed(self, request_ids: Sequence[str]) -> dict[str, tuple[int, list[int]]]:
        """What `release` would free, by request: see `SchedulerHandle.blocks_freed`."""
        return self.scheduler.blocks_freed(request_ids)

    def release(self, request_ids: Iterable[str]) -> None:
        """Lets requests go that went on elsewhere. Their blocks are free at once, cached prefixes stay."""
        ids = list(request_ids)
        self.abort(ids)
        self.forget(self.scheduler.take_finished(ids))

    def check_memory(self, memory: LayerMemory) -> Sequence[str]:
        """Laws of the memory that KV and weights share while this lane runs, as sentences where one is broken."""
        return memory.check(memory.sizes.all_layers, memory.base_blocks)

    # Figures ---------------------------------------------------------------------------------------------------------

    def num_free(self) -> int:
        """Blocks that are free now, cached prefixes among them."""
        return self.scheduler.num_free()

    def num_used(self) -> int:
        """Blocks that requests hold."""
        return self.num_held - self.num_free()

    def num_available(self) -> int:
        """Blocks that are free, or that the lane can get while it runs."""
        return self.num_free()

    @property
    def num_arriving(self) -> int:
        """Requests that the scheduler does not serve yet, as their KV is on its way."""
        return 0

    def longest_tokens(self) -> int:
        """Tokens of the running request with the most, where that decides about a shape; else 0."""
        return 0

    def stats(self, last_step_s: float = 0.0, idle: Mapping[str, int] = NOTHING, **shown: Any) -> InstanceStats:
        """Load after the last step; parked requests, and those whose KV is on its way, count as waiting.

        `idle` (totals of lanes that do not run) is added, `shown` replaces fields.
        """
        running, waiting = self.scheduler.counts()
        num_parked, num_arriving = self._num_parked(), self.num_arriving
        fields: dict[str, Any] = self.totals()
        for name, value in idle.items():
            fields[name] += value
        capacity = self.capacity
        fields.update(
            num_running=running,
            num_waiting=waiting + num_parked + num_arriving,
            num_holding=len(self.scheduler.holding) + num_arriving,
            kv_blocks_used=self.num_used(),
            prefilling_tokens=self.scheduler.prefilling_tokens(),
            last_step_s=last_step_s,
            shape=self.shape,
            block_size=capacity.block_size,
            kv_blocks_total=capacity.num_blocks,
            max_model_len=capacity.max_model_len,
            longest_tokens=self.longest_tokens(),
            **self.scheduler.ages(),
            **self._queue(waiting),
        )
        if self.residency is not None:
            fields |= self.residency.figures()
        fields |= shown
        return InstanceStats.of(fields)

    def totals(self) -> dict[str, int]:
        """Counts that only grow, by their names in `InstanceStats`."""
        return self._totals.named()

    @property
    def has_served(self) -> bool:
        """Whether the lane has made a step that counts."""
        return self._totals.steps > 0

    def kept_totals(self) -> LaneTotals:
        """The totals as they are, for `count_on_from`."""
        return self._totals.copy()

    def count_on_from(self, totals: LaneTotals) -> None:
        """Takes over `totals`: of the lane that this one replaces, or its own, where the steps since then belonged to
        no client's request.
        """
        self._totals.count_from(totals)

    def _queue(self, num_waiting: int) -> Mapping[str, int]:
        """What is known of waiting requests; counted again only when the queue has changed."""
        if not num_waiting:
            return NOTHING
        # A long answer that gives way takes the place of the prompt that begins: as many wait as before.
        version = (num_waiting, self._added, self._totals.preempted, self._totals.departures.by_memory)
        if self._queued[0] != version:
            self._queued = (version, self.scheduler.queued())
        return self._queued[1]

    def _count(self, batches: Iterable[EngineCoreOutputs], seconds: float, num_in_flight: int = 1) -> None:
        """Counts a step that took `seconds` of the whole model, one of so many that share what runs.

        A prompt counts in the step that ends it.
        """
        num_tokens, pairs = self._totals.count_step(batches)
        self._totals.count_ended(*self.scheduler.ended.take())
        context = self.num_used() * self.capacity.block_size
        num_seqs = self.scheduler.counts()[0] // num_in_flight
        self._totals.work.add(seconds, num_tokens, num_seqs, context // num_in_flight, pairs)
