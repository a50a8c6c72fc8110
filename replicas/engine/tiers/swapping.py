"""Requests of a pipeline whose KV is more than its devices hold: some wait on the host, with all of their KV.

A pipeline's scheduler has the blocks of the devices alone, and a stage steps over KV that is on its device in all of
its layers. So a request is on the device, or on the host, as a whole:

    running ── an order, or another one needs its blocks (`swap_order.py`) ──> parked, on the device
    parked, on the device ── its blocks are needed ──> parked, on the host: its blocks are free
    parked ── there is room for it, and a block more for each that runs ──> its KV comes beside the others' steps
    its KV is there on all members ──> waits for its slot, before all new ones

The leader decides, about requests that are in no microbatch. What has to be copied goes along with the next microbatch
(`Swap`): each member begins to copy the KV of its own layers before it runs that, and a step waits for copies of the
blocks that it takes (`kv/stage_copies.py`). So copies and steps have one order on all members. Full blocks never
change: a copy of them that is on the host stays there while there is room, and is not made again.

Only where the host is full too a request gives up its KV, as vLLM preempts.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from pengserve.replicas.engine.scheduling.microbatches import Microbatches
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.tiers.host_prefixes import HostPrefixes
from pengserve.replicas.engine.tiers.parked import ParkedRequests
from pengserve.replicas.engine.tiers.swap_order import ByAge, Rank, SwapOrder
from pengserve.replicas.engine.tiers.swap_queue import SwapQueue
from pengserve.replicas.engine.vllm_seam import Request, SchedulerOutput
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.memory.arena.free_chunks import FreeChunks


@dataclass(slots=True)
class _Copy:
    """What the host has of a request."""

    request: Request
    rows: list[int] = field(default_factory=list)  # of its blocks, in order
    num_tokens: int = 0  # whose KV the rows have
    is_away: bool = False  # it has no blocks on the device
    arrival: int = 0  # the swap-in that brought its KV back last, or is doing so

    @property
    def is_whole(self) -> bool:
        """Whether it is all KV of the request: it has not been stepped since."""
        return bool(self.num_tokens == self.request.num_computed_tokens)


class SwappedRequests(ParkedRequests):
    """Of a pipeline's leader."""

    place_refusal = "in a pipeline a request is on the devices or on the host as a whole"

    def __init__(
        self,
        scheduler: SchedulerHandle,
        tiers: TieredKv,
        num_layers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            tiers: count what is copied.
            num_layers: of the leader's stage.
        """
        super().__init__(scheduler, clock)
        self._tiers, self._num_layers, self._block_size = tiers, num_layers, tiers.block_size
        self._copies: dict[str, _Copy] = {}
        self._free_rows, self.num_rows = FreeChunks(0), 0
        self.order: SwapOrder = ByAge()  # who leaves first, and who comes back first
        self.queue = SwapQueue()
        self.prefixes = HostPrefixes(scheduler, lambda: self._free_rows, self.queue, tiers.counts)
        self._num_kept_free = 0
        self._times_away: dict[str, int] = {}
        self._num_swapped: dict[str, int] = {}  # blocks that were copied for a request, either way
        self._is_idle = False  # nothing was to step before the next microbatch

    def limit(self, num_rows: int) -> None:
        """Every member has room for so many stage rows; never fewer than before, until `clear`."""
        if num_rows > self.num_rows:
            self._free_rows.give(range(self.num_rows, num_rows))
            self.num_rows = num_rows

    def clear(self) -> None:
        """The pipeline has ended: no request is here, and there are no rows."""
        self._parked, self._ordered, self._since, self._copies, self._times_away = {}, set(), {}, {}, {}
        self._num_swapped = {}
        self._free_rows, self.num_rows, self._num_kept_free = FreeChunks(0), 0, 0
        self.queue.clear()
        self.prefixes.clear()

    def keep_free(self, num_blocks: int) -> None:
        """So many blocks are to become free, and to stay so, until this is called again."""
        self._num_kept_free = num_blocks
        self.prefixes.is_closed = num_blocks > 0

    @property
    def _num_free(self) -> int:
        return self._scheduler.num_free() - self._num_kept_free

    def expect(self, request: Request, num_computed_tokens: int) -> list[int] | None:
        """Takes a request whose KV is to come to the host; its stage rows, or None where there is no room.

        It is parked once it is kept (`keep`); its KV must be there by then.
        """
        count = self._blocks(num_computed_tokens)
        if not self._free_rows_for(count, request.request_id):
            return None
        self._scheduler.take(request, num_computed_tokens)
        rows = self._free_rows.take(count)
        self._copies[request.request_id] = _Copy(request, rows, num_computed_tokens, is_away=True)
        return rows

    def forget(self, request_ids: Iterable[str]) -> None:
        """As of any lane. What the host has of them is kept as prefixes."""
        ids = list(request_ids)
        super().forget(ids)
        for request_id in ids:
            self._times_away.pop(request_id, None)
            self._num_swapped.pop(request_id, None)
            if (copy := self._copies.pop(request_id, None)) is not None:
                self._free_rows.give(self.prefixes.adopt(copy.request, copy.rows, copy.num_tokens))

    # Orders -----------------------------------------------------------------------------------------------------------

    def park(self, request_ids: Sequence[str]) -> list[str]:
        """As of any lane. One that is in a microbatch is parked when that has come back."""
        running = {request.request_id for request in self._scheduler.running}
        found = [request_id for request_id in request_ids if request_id in running or request_id in self._parked]
        self._ordered.update(found)
        return found

    def unsettle(self) -> None:
        """As of any lane: who is stepped is chosen anew before each microbatch."""

    def place(self, request_id: str, layers: Sequence[int]) -> bool:
        """No; see `place_refusal`."""
        return False

    # Figures ----------------------------------------------------------------------------------------------------------

    def figures(self) -> dict[str, int | float]:
        """As of any lane. Blocks are those of the pipeline, and the host holds its stage rows."""
        used = self._scheduler.num_blocks - 1 - self._scheduler.num_free()
        return {
            **self._tiers.figures(),
            "device_blocks": self._scheduler.num_blocks - 1,
            "device_blocks_used": used,
            "host_blocks": self.num_rows,
            "host_blocks_used": self.num_rows - len(self._free_rows),
            "num_parked": self.num_parked(),
        }

    def rows_of(self, request: Request) -> list[int]:
        """The stage rows that have all KV of a request that has no blocks; empty where it has."""
        copy = self._copies.get(request.request_id)
        return copy.rows if copy is not None and copy.is_away and copy.request is request else []

    def is_coming(self, request: Request) -> bool:
        """Whether its KV is on its way back to the devices."""
        copy = self._copies.get(request.request_id)
        return copy is not None and not copy.is_away and copy.arrival > self.queue.num_come

    def has_work(self) -> bool:
        """As of any lane, and whether a new request waits for its prefix."""
        return super().has_work() or self.prefixes.num_coming > 0

    def times_away(self, request: Request) -> int:
        """How often its KV has gone to the host."""
        return self._times_away.get(request.request_id, 0)

    def check(self) -> tuple[str, ...]:
        """Laws that are broken, in sentences: each stage row has one owner, or none."""
        rows = [*self._free_rows, *self.prefixes.rows, *(row for copy in self._copies.values() for row in copy.rows)]
        return () if sorted(rows) == list(range(self.num_rows)) else ("a stage row has no owner, or several",)

    # Before a microbatch ----------------------------------------------------------------------------------------------

    def schedule(
        self,
        microbatches: Microbatches,
        in_flight: Sequence[SchedulerOutput],
        max_in_flight: int,
        limiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> SchedulerOutput:
        """The next microbatch, while the others are under way; what it has no blocks for leaves the devices.

        Args:
            limiting: around vLLM's step, what keeps prompts back. It counts those that hold KV, so it comes after these
                have come back.
        """
        ids = {request_id for output in in_flight for request_id in output.num_scheduled_tokens}
        self._begin(ids)
        with limiting():
            if not self._keeps_new_back():
                self.prefixes.begin(self._num_free - self._num_others(), self._may_step)
            budget = self._make_room(microbatches.choose(in_flight, max_in_flight, self._may_step), ids)
            # Only now: who has left for want of room gives no place to a new one.
            with (
                self._scheduler.limited(num_new=0) if self._keeps_new_back() else nullcontext(),
                self.prefixes.saving(),
            ):
                output = self._scheduler.schedule_only(budget)
        self._is_idle = not (in_flight or output.total_num_scheduled_tokens)
        return output

    def _begin(self, in_flight: Set[str]) -> None:
        """Parks what an order wants parked, and brings back what there is room for."""
        if self._ordered or self._parked or self._copies:
            self._forget_ended()
            self._park_ordered(in_flight)
        if self._num_kept_free:
            self._empty_for(0, in_flight)
        self.prefixes.go_on(is_alone=self._is_idle or not self._num_others())
        if self._parked:
            self._bring_back(in_flight)

    def _may_step(self, request: Request) -> bool:
        """Whether the next microbatch may have this request."""
        if request.request_id in self._ordered:
            return False
        return not self._holds_back(request)

    def _keeps_new_back(self) -> bool:
        """Whether no request without KV may begin with the next microbatch."""
        if self._num_kept_free:
            return True
        first = next(iter(self._scheduler.waiting), None)
        return first is not None and self._holds_back(first)

    def _holds_back(self, request: Request) -> bool:
        """Whether a new request waits for parked ones, which are older or more urgent."""
        if request.num_computed_tokens:
            return False
        without = [parked for parked in self._waiting_for_room() if not self.is_coming(parked)]
        return bool(without) and min(map(self._band, without)) <= request.priority

    def _make_room(self, budget: Mapping[str, int], in_flight: Set[str]) -> dict[str, int]:
        """Finds blocks for the tokens of a microbatch: requests leave the device, also some of `budget`.

        Returns what is left of the budget. What needs blocks waits for the next microbatch where a request that is to
        leave rather than those that could comes back before that. vLLM preempts where blocks are still missing.
        """
        most = sum(budget.values()) // self._block_size + len(budget)
        if not self._scheduler.holding and most <= self._num_free:
            return dict(budget)
        left = dict(budget)
        growth = {
            r.request_id: self._growth(r, left[r.request_id]) for r in self._scheduler.running if r.request_id in left
        }
        growth |= {r.request_id: self._rest(r) for r in self._scheduler.holding if r.request_id in left}
        while sum(growth.values()) > self._num_free:
            victim = self._victim(in_flight)
            if victim is not None and self.order.waits_for(self._are_in(in_flight), victim, self._band(victim)):
                left = {request_id: count for request_id, count in left.items() if not growth.get(request_id)}
                break
            if victim is None or not self._put_away(victim):
                break
            left.pop(victim.request_id, None)
            growth.pop(victim.request_id, None)
        return left

    # Who leaves, who comes back ---------------------------------------------------------------------------------------

    def _park_ordered(self, in_flight: Set[str]) -> None:
        """Also one that has lost its KV since: it does not begin again before an order says so."""
        here = [*self._scheduler.running, *self._scheduler.holding, *self._scheduler.waiting] if self._ordered else []
        for request in here:
            if request.request_id in self._ordered and request.request_id not in in_flight:
                self._hold(request)

    def _hold(self, request: Request) -> None:
        if request in self._scheduler.running:
            self._scheduler.hold(request)
        else:
            self._scheduler.withdraw(request)
        self.keep(request)
        self._tiers.counts.parks += 1

    def _victim(self, in_flight: Set[str], but: str = "") -> Request | None:
        """The request that leaves the device next: one that an order has parked, else the first by `order`."""
        here = [r for request_id, r in self._parked.items() if not self._is_away(request_id)]
        here += [r for r in (*self._scheduler.running, *self._scheduler.holding) if r.request_id not in in_flight]
        here = [request for request in here if request.request_id != but and request.num_computed_tokens]
        return max(here, key=self._dispensability, default=None)

    def _dispensability(self, request: Request) -> Rank:
        is_coming = self.is_coming(request)
        band = request.priority if is_coming else self._band(request)
        return request.request_id in self._ordered, *self.order.leaving(request, band, is_coming=is_coming)

    def _are_in(self, in_flight: Set[str]) -> list[Request]:
        return [request for request in self._scheduler.running if request.request_id in in_flight]

    def _put_away(self, request: Request) -> bool:
        """A request's KV goes to the host, and its blocks are free. Where the host is full, a parked one loses its KV.

        Returns whether its blocks are free.
        """
        copy = self._copies.setdefault(request.request_id, _Copy(request))
        blocks = self._scheduler.block_ids(request.request_id)[: self._blocks(request.num_computed_tokens)]
        num_full = min(copy.num_tokens, request.num_computed_tokens) // self._block_size
        if copy.is_whole:
            num_full = len(blocks)
        missing = len(blocks) - len(copy.rows)
        if missing > 0 and not self._free_rows_for(missing, request.request_id):
            if request.request_id in self._parked:
                self._give_up(request)
                return True
            return False
        if missing > 0:
            copy.rows += self._free_rows.take(missing)
        if num_full < len(blocks):
            self.queue.save(blocks[num_full:], copy.rows[num_full : len(blocks)])
        self._tiers.counts.evicted += len(blocks) * self._num_layers
        self._tiers.counts.reused += num_full * self._num_layers
        if request.request_id not in self._parked:
            self._hold(request)
        self._count_swapped(request, len(blocks) - num_full)
        copy.num_tokens, copy.is_away = request.num_computed_tokens, True
        self._times_away[request.request_id] = self.times_away(request) + 1
        self._scheduler.free(request)
        return True

    def _free_rows_for(self, count: int, but: str) -> bool:
        """Frees copies of requests that are on the device, until so many rows are free; whether they are."""
        self.prefixes.give_up(count - len(self._free_rows))
        for request_id in [i for i, copy in self._copies.items() if not copy.is_away and i != but]:
            if len(self._free_rows) >= count:
                break
            self._forget_copy(request_id)
        return len(self._free_rows) >= count

    def _bring_back(self, in_flight: Set[str]) -> None:
        """Parked requests go on, by `order`, while there is room for them and a block more for each that runs.

        FastSwitch Algorithm 1: while others run, a request's KV comes beside their steps, and it waits for that alone.
        Else it is stepped at once, and the step waits: one such request alone, beside which the KV of others comes.
        """
        waiting = self._waiting_for_room()
        waiting.sort(key=lambda r: self.order.coming(r, self._band(r)))
        num_coming = sum(map(self.is_coming, waiting)) + self.prefixes.num_coming
        is_full = is_waited_for = False
        for request in waiting:
            if request.request_id not in self._parked:  # it has given up its KV to make room for one before it
                continue
            others = self._num_others()
            if self.is_coming(request):
                if not is_waited_for and (not others or self._is_idle):
                    num_coming, is_waited_for = num_coming - 1, True
                    self._let_step(request)
                continue
            if is_full:
                continue
            if self._is_back(request):
                self._let_step(request)
                continue
            needed = self._rest(request)
            if not (others or num_coming or in_flight):
                self._empty_for(needed, in_flight, request.request_id)
            if not self._has_room(request, needed + num_coming, in_flight) or not self._come_back(request):
                is_full = True
            elif self.is_coming(request) and (others or is_waited_for):
                num_coming += 1
            else:
                is_waited_for = is_waited_for or self.is_coming(request)
                self._let_step(request)

    def _has_room(self, request: Request, needed: int, in_flight: Set[str]) -> bool:
        """Whether there are so many blocks for a request that comes back, and one for each that runs; others make way
        for it as `order` says, those in microbatches when these have come back.
        """
        if self._num_free >= needed + self._num_others():
            return True
        running = [*self._scheduler.running, *self._scheduler.holding]
        victims = self.order.making_way(request, running)
        freed = sum(self._num_blocks(victim) + 1 for victim in victims)
        if not victims or self._num_free + freed < needed + len(running):
            return False
        num_gone = 0
        for victim in victims:
            if self._num_free >= needed + self._num_others():
                break
            if victim.request_id not in in_flight and victim.num_computed_tokens:
                num_gone += self._put_away(victim)
        if num_gone:
            self.order.made_way(request, num_gone)
        return self._num_free >= needed + self._num_others()

    def _num_others(self) -> int:
        """Requests that the next microbatches may step."""
        return len(self._scheduler.running) + len(self._scheduler.holding)

    def _is_back(self, request: Request) -> bool:
        """Whether its KV has come back since it was parked: its place was found then."""
        copy = self._copies.get(request.request_id)
        return copy is not None and copy.arrival > 0 and not copy.is_away and copy.is_whole

    def _let_step(self, request: Request) -> None:
        del self._parked[request.request_id]
        self._scheduler.enqueue(request)
        self._goes_on(request)
        self.order.came_back(request)

    def _empty_for(self, needed: int, in_flight: Set[str], but: str = "") -> None:
        """Requests leave the device until so many blocks are free, beside those that are kept free."""
        while self._num_free < needed:
            victim = self._victim(in_flight, but)
            if victim is None or not self._put_away(victim):
                return

    def _come_back(self, request: Request) -> bool:
        """A request's KV comes to the device, if it is not there; whether there is room."""
        if not self._is_away(request.request_id):
            return True
        copy = self._copies[request.request_id]
        with self.prefixes.saving():
            num_cached = self._scheduler.reserve_again(request)
        if num_cached is None:
            return False
        first = num_cached // self._block_size
        stop = self._blocks(request.num_computed_tokens)
        blocks = self._scheduler.block_ids(request.request_id)
        copy.arrival = self.queue.bring(blocks[first:stop], copy.rows[first:stop])  # what it shares has come by then
        self._count_swapped(request, stop - first)
        self._scheduler.cache(request)
        copy.is_away = False
        return True

    # Copies -----------------------------------------------------------------------------------------------------------

    def _is_away(self, request_id: str) -> bool:
        return request_id in self._copies and self._copies[request_id].is_away

    def _give_up(self, request: Request) -> None:
        self._forget_copy(request.request_id)
        super()._give_up(request)

    def _forget_ended(self) -> None:
        """Of requests that have ended in a microbatch."""
        noted = dict.fromkeys((*self._copies, *self._ordered, *self._times_away, *self._num_swapped))
        self.forget(request_id for request_id in noted if not self._scheduler.knows(request_id))

    def _count_swapped(self, request: Request, num_blocks: int) -> None:
        self._num_swapped[request.request_id] = self._num_swapped.get(request.request_id, 0) + num_blocks

    def _num_copied(self, request: Request) -> np.ndarray:
        return np.array(self._num_swapped.get(request.request_id, 0))

    def _swapped_bytes(self, request: Request, before: np.ndarray) -> int:
        pool = self._tiers.pool
        return int(self._num_copied(request) - before) * pool.num_layers * pool.block_bytes

    def _forget_copy(self, request_id: str) -> None:
        copy = self._copies.pop(request_id, None)
        if copy is not None:
            self._free_rows.give(copy.rows)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _growth(self, request: Request, num_tokens: int) -> int:
        """Blocks that a request needs for so many tokens more."""
        return max(0, self._blocks(request.num_computed_tokens + num_tokens) - self._num_blocks(request))

    def _rest(self, request: Request) -> int:
        """Blocks that it needs for all of its tokens: vLLM gives no slot to a request before these are free."""
        return max(0, self._blocks(request.num_tokens) - self._num_blocks(request))

    def _num_blocks(self, request: Request) -> int:
        return self._scheduler.num_blocks_of(request.request_id)
