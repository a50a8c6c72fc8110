"""Requests of an instance whose KV is more than the device holds: who is stepped, who is parked, who comes back.

A parked request has left vLLM's batch with its KV: `hold` in vLLM's terms. Its blocks stay where they are until their
cells are needed; then they go to the host. It comes back (`resume`) without computing anything again. What vLLM itself
would preempt, because its pool has no block left, is the case in which the host is full too: then the youngest parked
request gives up its KV, as vLLM preempts.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Protocol

import numpy as np

from pengserve.planners.preemption import Candidate, plan_places
from pengserve.planners.residency import Device, Wanting, plan_residency
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle, is_prefilling
from pengserve.replicas.engine.tiers.lane_tiers import LaneTiers
from pengserve.replicas.engine.tiers.parked import ParkedRequests
from pengserve.replicas.engine.tiers.placed_layers import PlacedLayers
from pengserve.replicas.engine.tiers.turns import Turns
from pengserve.replicas.engine.vllm_seam import Request


class Supply(Protocol):
    """What a lane has for its scheduler to hand out."""

    def num_used(self) -> int:
        """Blocks that requests hold."""

    def num_available(self) -> int:
        """Blocks that are free, or can be leased."""


class Progress(Protocol):
    """How far the steps are that a lane has begun."""

    def num_written(self, request: Request) -> int:
        """Tokens of a request whose KV is there."""

    def ids_in_flight(self) -> Set[str]:
        """Requests that steps are about which have begun and not ended."""


class Ended(Progress):
    """Of a lane whose steps have ended when the next one is chosen."""

    def num_written(self, request: Request) -> int:
        """All that count as computed."""
        return int(request.num_computed_tokens)

    def ids_in_flight(self) -> Set[str]:
        """None."""
        return frozenset()


class ResidentRequests(ParkedRequests):
    """Of a lane whose scheduler has the blocks of both tiers to hand out."""

    def __init__(
        self,
        scheduler: SchedulerHandle,
        tiers: LaneTiers,
        num_reserved: int,
        supply: Supply,
        clock: Callable[[], float] = time.monotonic,
        progress: Progress | None = None,
    ) -> None:
        """
        Args:
            progress: of a lane that begins steps before others have ended.
            num_reserved: blocks that may be on the device in all layers because the host is full.
            clock: seconds.
        """
        super().__init__(scheduler, clock)
        self.tiers, self._block_size, self._supply = tiers, tiers.block_size, supply
        self._progress = progress or Ended()
        self._leaving: frozenset[str] = frozenset()  # are parked when the steps have ended that are about them
        layers = tiers.num_layers
        self.device_blocks = tiers.device_blocks  # of this member, vLLM's null block among them
        self._num_whole = 0  # blocks that the smallest device of the members holds in all layers
        self._device = Device(
            num_cells=0,
            num_reserved=num_reserved,
            num_layers=layers,
            block_size=self._block_size,
            max_tokens=scheduler.max_step_tokens,
        )
        self.limit(tiers.device_blocks)
        self._without_place: set[str] = set()  # in the next step, as more urgent requests have their places,
        self._begins: Sequence[Request] | None = None  # ... and those that begin; None: as many as there are places
        self.turn_s = math.inf  # while placements are planned: requests that were parked for so long come first
        self._stepped: frozenset[str] = frozenset()  # as the planner of placements says, which leaves room to grow
        self._paused: frozenset[str] = frozenset()  # not stepped, as it says
        self.layers = PlacedLayers(
            scheduler, tiers, self._progress.num_written
        )  # of requests, those that are kept on the host
        self._settled: tuple[object, ...] | None = None  # the state for which the newest choice stands,
        self._num_new = 0  # ... the requests without KV that it lets begin,
        self._num_available = 0  # ... and the blocks that were left after its step
        self._prompts: list[Request] = []  # whose blocks are written behind after this step
        self.has_chosen = False  # for the newest step
        self._turns = Turns(scheduler, lambda request: self._blocks(request.num_computed_tokens))

    def limit(self, device_blocks: int, num_reserved: int | None = None) -> None:
        """The smallest device of the members holds so many blocks in all layers, vLLM's null block among them.

        Args:
            num_reserved: as when this was made; None: as it was.
        """
        self._num_whole = device_blocks - 1
        self._device = replace(
            self._device,
            num_cells=self._num_whole * self._device.num_layers,
            num_reserved=self._device.num_reserved if num_reserved is None else num_reserved,
        )

    # Orders -----------------------------------------------------------------------------------------------------------

    def park(self, request_ids: Sequence[str]) -> list[str]:
        """As of any lane. One that a step is about is parked when that has ended."""
        running = {request.request_id for request in self._scheduler.running}
        found = [request_id for request_id in request_ids if request_id in running or request_id in self._parked]
        self._ordered.update(found)
        self._leaving |= running & set(found)
        self._park_leaving()
        return found

    def place(self, request_id: str, layers: Sequence[int]) -> bool:
        """Full blocks of a request are on the host alone in these layers of the model; whether it is here."""
        if not self._scheduler.knows(request_id):
            return False
        self.layers.say(request_id, layers, is_ordered=True)
        return True

    def arrange(self, stepped: Iterable[str], paused: Iterable[str], layers: Mapping[str, Sequence[int]]) -> None:
        """What the planner of placements says: who is stepped from now on and who is not, and whose layers change."""
        self._stepped, self._paused = frozenset(stepped), frozenset(paused)
        for request_id, chosen in layers.items():
            self.spread(request_id, chosen)
        self.unsettle()

    def spread(self, request_id: str, layers: Sequence[int]) -> None:
        """Full blocks of a request are on the hosts alone in these layers of each member from now on."""
        self.layers.say(request_id, self.tiers.everywhere(layers))

    @property
    def paused(self) -> frozenset[str]:
        """Requests that are not stepped, as `arrange` said."""
        return self._paused

    def unsettle(self) -> None:
        """Requests have another urgency: who is stepped is chosen anew."""
        self._settled = None

    def forget(self, request_ids: Iterable[str]) -> None:
        """As of any lane."""
        ids = list(request_ids)
        super().forget(ids)
        self.layers.forget(ids)
        self._leaving -= set(ids)

    def has_just_come_back(self, request: Request) -> bool:
        """Whether it has made few tokens since it was parked last."""
        return self._turns.is_under_way(request)

    def is_coming(self, request: Request) -> bool:
        """Whether a request is parked still, though `arrange` said that it is stepped."""
        return request.request_id in self._parked and request.request_id in self._stepped

    # Figures ----------------------------------------------------------------------------------------------------------

    @property
    def num_cells(self) -> int:
        """Of the smallest device of the members, for KV."""
        return self._device.num_cells

    @property
    def num_held_blocks(self) -> int:
        """Blocks that requests hold, on the device or on the host."""
        return self._supply.num_used()

    def figures(self) -> dict[str, int | float]:
        """Figures and totals, by their names in `InstanceStats`."""
        return {**self.tiers.figures(), "num_parked": self.num_parked()}

    # Steps ------------------------------------------------------------------------------------------------------------

    def has_to_choose(self) -> bool:
        """Whether the next step cannot take all that vLLM's scheduler would."""
        if self.layers:
            self.layers.renew()
        if self._leaving:
            return True
        if not self._parked:
            return bool(self._paused) or self._is_short() or self._is_outranked()
        if self._settled is None or self._supply.num_available() != self._num_available:
            return True
        return self._state() != self._settled or self._is_changing()

    def _state(self) -> tuple[object, ...]:
        """What decides who is stepped, while none that runs needs a block or has a prompt, and none comes back."""
        scheduler = self._scheduler
        counts = (len(scheduler.running) + len(scheduler.holding), len(self._parked), len(self._ordered))
        first = scheduler.waiting.peek_request().request_id if scheduler.waiting else ""
        state = (*counts, first, scheduler.takes_new and scheduler.new_slots > 0)
        if not scheduler.goes_by_priority:
            return state
        num_turns = sum(map(self._turns.is_under_way, (*scheduler.running, *scheduler.holding)))
        return (*state, len(scheduler.waiting), num_turns, self.aged_s())

    def _is_changing(self) -> bool:
        """Whether requests that wait begin, or one that runs has a prompt or needs a block in the next step."""
        scheduler, size = self._scheduler, self._block_size
        if scheduler.holding or not scheduler.running or (scheduler.waiting and self._num_new):
            return True
        return any(r.num_computed_tokens % size == 0 or is_prefilling(r) for r in scheduler.running)

    def choosing(self) -> contextlib.AbstractContextManager[None]:
        """As `step`, where there is something to choose; else the newest choice stands, if there was one."""
        self.has_chosen = self.has_to_choose()
        if self.has_chosen:
            return self.step()
        return self._scheduler.limited(num_new=0) if self._parked else contextlib.nullcontext()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Within it, vLLM schedules one step of what the device can hold. Only where `has_to_choose`."""
        self._prompts.clear()
        if self._scheduler.goes_by_priority:
            self._give_places()
        wanting = self._wanting()
        # Once the host is full, as many blocks as it has no room for cannot leave the device. Seldom is it.
        num_stuck = self.tiers.num_stuck + len(wanting) + self._blocks(self._device.max_tokens)
        num_reserved = min(self._device.num_reserved, max(0, num_stuck))
        device = replace(self._device, num_free=self._supply.num_available(), num_reserved=num_reserved)
        plan = plan_residency([wanted for _, wanted in wanting], device)
        stepped = [request for request, wanted in wanting if wanted.request_id in plan.stepped]
        self._park_others(plan.stepped)
        self._free_blocks_for(stepped)
        self._bring_back([request for request in stepped if request.request_id in self._parked])
        is_coming = any(request.request_id in self._parked for request in stepped)
        self._settled, self._num_new = None if is_coming else self._state(), plan.num_new
        self._prompts += filter(is_prefilling, stepped)
        with self._scheduler.limited(num_new=plan.num_new, max_tokens=plan.max_tokens):
            yield
        self._num_available = self._supply.num_available()
        self._write_behind()

    def _is_short(self) -> bool:
        """Whether the requests that the next step may take could need more than the device holds in all layers."""
        scheduler, held = self._scheduler, self._supply.num_used()
        coming = len(scheduler.running) + len(scheduler.holding)
        if not scheduler.waiting and held + coming + self._blocks(self._device.max_tokens) <= self._num_whole:
            return False
        for request in self._waiting():
            coming += self._blocks(request.num_tokens) + 1
        more = sum(map(self._growth, filter(is_prefilling, scheduler.running)))
        return held + coming + more > self._num_whole

    def _is_outranked(self) -> bool:
        """Whether a request waits for a place that is more urgent than one that has one."""
        scheduler = self._scheduler
        if not scheduler.goes_by_priority or not scheduler.waiting or scheduler.new_slots or not scheduler.takes_new:
            return False
        first = scheduler.waiting.peek_request()
        return any(request.priority > first.priority for request in scheduler.running)

    def _give_places(self) -> None:
        """Parks those whose place in the batch a more urgent request takes."""
        scheduler = self._scheduler
        here = [r for r in (*scheduler.running, *scheduler.holding) if r.request_id not in self._paused]
        parked = [(r, self._by_age(r)) for r in self._waiting_for_room()]
        self._turns.choose(parked, here, self._num_whole)
        waiting = self._with_room() if scheduler.takes_new else []
        found = [self._candidate(r, r.priority, is_running=True) for r in here]
        found += [self._candidate(r, band, is_parked=True) for r, band in parked]
        found += [self._candidate(r, r.priority) for r in waiting]
        places = plan_places(found, scheduler.max_running)
        self._without_place = {r.request_id for r, _ in parked} - places.placed
        self._without_place |= set(places.victims)
        self.tiers.count_displaced(len(places.victims))
        self._begins = waiting[: places.num_new]

    def _with_room(self) -> list[Request]:
        """The most urgent requests that wait and could begin: a place is of use only where there are blocks too."""
        found, left = [], self._supply.num_available()
        for request, _ in zip(self._scheduler.waiting, range(self._scheduler.max_running), strict=False):
            left -= self._blocks(request.num_tokens) + 1
            if left < 0:
                break
            found.append(request)
        return found

    def _candidate(
        self, request: Request, aged: int, *, is_running: bool = False, is_parked: bool = False
    ) -> Candidate:
        return Candidate(
            request_id=request.request_id,
            band=self._turns.band(request, aged),
            tag=request.arrival_time,
            num_blocks=self._blocks(request.num_computed_tokens),
            is_running=is_running,
            is_parked=is_parked,
            is_protected=is_running and self.has_just_come_back(request),
        )

    def _waiting(self) -> Sequence[Request]:
        scheduler = self._scheduler
        slots = scheduler.new_slots if scheduler.takes_new else 0
        return [request for request, _ in zip(scheduler.waiting, range(slots), strict=False)]

    def _wanting(self) -> list[tuple[Request, Wanting]]:
        scheduler = self._scheduler
        here = [r for r in (*scheduler.running, *scheduler.holding) if r.request_id not in self._paused]
        placed = [r for r in (*here, *self._waiting_for_room()) if r.request_id not in self._without_place]
        old = sorted(placed, key=lambda r: (self._band(r), not self._has_turn(r), r.arrival_time, r.request_id))
        found = [(request, self._wanted(request, is_new=False)) for request in old if not self._is_unwanted(request)]
        new = self._waiting() if self._begins is None else self._begins
        return found + [(request, self._wanted(request, is_new=True)) for request in new]

    def _has_turn(self, request: Request) -> bool:
        """Whether placements are planned, and it was parked for too long all the same, or came back a moment ago."""
        if not self._stepped:
            return False
        return (self.parked_s(request) or 0.0) >= self.turn_s or self.has_just_come_back(request)

    def _waiting_for_room(self) -> list[Request]:
        return [request for request in super()._waiting_for_room() if request.request_id not in self._paused]

    def _wanted(self, request: Request, *, is_new: bool) -> Wanting:
        if is_new:
            num_computed, shared = self._scheduler.cached_prefix(request)
        else:
            num_computed, shared = request.num_computed_tokens, self._scheduler.shared_blocks(request.request_id)
        num_tokens = max(1, request.num_tokens - num_computed)
        return Wanting(
            request_id=request.request_id,
            num_blocks=self._blocks(request.num_tokens + (num_tokens == 1)),
            num_tokens=num_tokens,
            is_parked=request.request_id in self._parked and request.request_id not in self._stepped,
            is_new=is_new,
            shared=tuple(shared),
            away=() if is_new else self.layers.layers(request.request_id),
            num_away=0 if is_new else self.layers.num_away(request, len(shared)),
            band=self._band(request) if self._scheduler.goes_by_priority else 0,
        )

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _growth(self, request: Request) -> int:
        """Blocks that the next step adds to a request at most."""
        missing = request.num_tokens - request.num_computed_tokens
        stop = request.num_computed_tokens + min(missing, self._device.max_tokens)
        return self._blocks(stop) - self._blocks(request.num_computed_tokens)

    # Parking ----------------------------------------------------------------------------------------------------------

    def may_step(self, request: Request) -> bool:
        """Whether the next step may have a running request."""
        return request.request_id not in self._leaving

    def _is_unwanted(self, request: Request) -> bool:
        """Whether an order parks a request that a step is about still."""
        return request.request_id in self._ordered and request.request_id in self._leaving

    def _park_others(self, stepped: frozenset[str]) -> None:
        running = {request.request_id for request in self._scheduler.running}
        self._leaving = frozenset(running - stepped)
        self._park_leaving()
        for request in list(self._scheduler.holding):
            if request.request_id not in stepped:
                self._scheduler.withdraw(request)
                self.keep(request)

    def _park_leaving(self) -> None:
        """Parks those of which no step is under way."""
        busy = self._progress.ids_in_flight()
        for request in list(self._scheduler.running):
            if request.request_id in self._leaving and request.request_id not in busy:
                self._hold(request)
        self._leaving &= busy

    def _hold(self, request: Request) -> None:
        self._scheduler.hold(request)
        self.keep(request)
        self.tiers.count_park()
        self._save(request)

    def _free_blocks_for(self, stepped: Sequence[Request]) -> None:
        """Where vLLM's pool has too few blocks for the step, the youngest parked requests give up theirs."""
        needed = sum(self._growth(request) for request in stepped)
        chosen = {request.request_id for request in stepped}
        victims = sorted(
            (r for request_id, r in self._parked.items() if request_id not in chosen),
            key=lambda r: (r.priority, r.arrival_time, r.request_id),
        )
        while victims and self._supply.num_available() < needed:
            victim = victims.pop()
            self._give_up(victim)

    def _bring_back(self, chosen: Sequence[Request]) -> None:
        """Parked requests go on. While others run, their KV comes back beside the steps, and they wait for it.

        FastSwitch Algorithm 1: swapped in asynchronously where the step has other work, else at once; "at once" is
        here layer by layer, ahead of the computation.
        """
        if not chosen:
            return
        others = [*self._scheduler.running, *self._scheduler.holding]
        running = self._blocks_of(others)
        for request in chosen:
            blocks = self._blocks_of([request])
            if others and (self.tiers.is_moving(blocks) or self.tiers.bring(blocks, running)):
                continue
            self._turns.come_back(request, self._band(request))
            del self._parked[request.request_id]
            self._scheduler.enqueue(request)
            self._goes_on(request)

    def _blocks_of(self, requests: Iterable[Request]) -> list[int]:
        """Blocks that hold KV; what came from elsewhere may have others, for tokens to come."""
        found: list[int] = []
        for request in requests:
            found += self._scheduler.block_ids(request.request_id)[: self._blocks(request.num_computed_tokens)]
        return found

    def _write_behind(self) -> None:
        """Full blocks of prompts go to the host beside the next step: there is not room for all of them here."""
        for request in self._prompts:
            if self._scheduler.knows(request.request_id):
                self._save(request)

    def _num_copied(self, request: Request) -> np.ndarray:
        return self.tiers.num_copied(self._blocks_of([request]))

    def _swapped_bytes(self, request: Request, before: np.ndarray) -> int:
        blocks = self._blocks_of([request])[: len(before)]
        return self.tiers.take_copied_bytes(blocks, before[: len(blocks)])

    def _save(self, request: Request) -> None:
        full = self._progress.num_written(request) // self._block_size
        self.tiers.write_behind(self._blocks_of([request])[:full])

    def _band(self, request: Request) -> int:
        if not self._scheduler.goes_by_priority:
            return request.priority
        return self._turns.band(request, self._by_age(request))

    def _by_age(self, request: Request) -> int:
        return super()._band(request)
