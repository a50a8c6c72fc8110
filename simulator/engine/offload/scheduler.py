"""A scheduler of small batches of long requests, whose layers a policy spreads over device and host.

As in OrbitFlow's vLLM 0.6: a prompt is computed alone, at once, as soon as there is a slot for it; all others decode
together. What a step waits for, its Algorithm 1 says. KV that is written goes to the host beside the steps, so a layer
that leaves the device costs nothing; one that comes back is staged once more.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pengserve.planners.cost_model import Chunk
from pengserve.planners.placement.latency import stall_s
from pengserve.planners.placement.solver import cells_of, fallback
from pengserve.planners.placement.spread import RESIDENT, Spread
from pengserve.planners.placement.values import Decode, Machine
from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.engine.memory import Tiers
from pengserve.simulator.engine.offload.planner import OffloadPlanner
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.scheduler import SimStep, check_admitted, check_fits
from pengserve.simulator.engine.unfinished import UnfinishedSteps
from pengserve.simulator.requests import LiveRequest
from pengserve.simulator.timing.steps import Batch, StepTimes

_FAR = 10_000  # tokens over which the price of context is measured


@dataclass(slots=True, eq=False)
class _Entry:
    live: LiveRequest
    computed: int = 0  # tokens
    spread: Spread = RESIDENT
    paused_at_s: float | None = None


class OffloadScheduler:
    """A `LaneScheduler` of one instance, first come first served."""

    def __init__(
        self,
        capacity: KvCapacity,
        options: SchedulerOptions,
        tiers: Tiers,
        times: StepTimes,
        planner: OffloadPlanner,
        clock: Callable[[], float],
    ) -> None:
        """`capacity`: of device and host together; a batch holds so many tokens at most."""
        self.capacity, self.options = capacity, options
        self.num_blocks = capacity.num_blocks
        self._times, self._planner, self._clock = times, planner, clock
        far_s, near_s = times.step_s(Batch(1, _FAR + 1)), times.step_s(Batch(1, 1))
        self.machine = Machine(
            num_layers=tiers.num_layers,
            block_size=capacity.block_size,
            num_cells=(tiers.device_blocks - 1) * tiers.num_layers,
            step_s=near_s,
            context_s=(far_s - near_s) / _FAR,
            cells_per_s=tiers.bytes_per_s / tiers.block_bytes,
        )
        self._running: list[_Entry] = []
        self._waiting: list[_Entry] = []
        self._unfinished: UnfinishedSteps[list[_Entry]] = UnfinishedSteps()
        self._last_step_s: float | None = None
        self._counts = dict.fromkeys(
            ("step", "total_prompt_tokens", "total_generated_tokens", "total_preemptions", "total_resumed"), 0
        )
        self.stalled_s = 0.0
        self.staged_cells = self.moved_cells = self.num_pauses = 0

    # What there is ----------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that no request has, of device and host."""
        return self.num_blocks - sum(self._blocks(entry.live.num_tokens) for entry in self._running)

    @property
    def running(self) -> Sequence[LiveRequest]:
        """Requests that hold KV, paused ones too."""
        return [entry.live for entry in self._running]

    @property
    def waiting(self) -> Sequence[LiveRequest]:
        """Requests that hold none."""
        return [entry.live for entry in self._waiting]

    @property
    def queued_tokens(self) -> int:
        """Of all waiting requests."""
        return sum(entry.live.num_tokens for entry in self._waiting)

    @property
    def prefilling_tokens(self) -> int:
        """Prompts are computed in one step each."""
        return 0

    @property
    def totals(self) -> dict[str, int]:
        """Counts that only grow."""
        return {**self._counts, "total_prefix_queries": 0, "total_prefix_hits": 0}

    def computed_tokens(self, request: LiveRequest) -> int:
        """Tokens whose KV is there."""
        return next(entry.computed for entry in self._running if entry.live is request)

    def cached_tokens(self, request: LiveRequest) -> int:
        """None: it finds no prefixes."""
        return 0

    def blocks_freed(self, requests: Sequence[LiveRequest]) -> list[tuple[int, list[int]]]:
        """Blocks that each request holds."""
        return [(self._blocks(request.num_tokens), []) for request in requests]

    def copied(self) -> dict[str, float]:
        """Totals of offloading."""
        return {
            "staged_cells": self.staged_cells,
            "moved_cells": self.moved_cells,
            "pauses": self.num_pauses,
            "stalled_s": self.stalled_s,
        }

    # Requests ---------------------------------------------------------------------------------------------------------

    def add(self, request: LiveRequest) -> None:
        """Queues a request, before all others if it has generated tokens. Raises PlanError where it is too long."""
        check_fits(request, self.capacity)
        if request.num_generated:
            self._counts["total_resumed"] += 1
        self._waiting.insert(0 if request.num_generated else len(self._waiting), _Entry(request))

    def admit(self, request: LiveRequest, computed_tokens: int) -> bool:
        """Takes a request with its KV; False without room."""
        check_fits(request, self.capacity)
        check_admitted(request, computed_tokens)
        if self._blocks(request.num_tokens) > self.num_free:
            return False
        self._running.append(_Entry(request, computed_tokens))
        return True

    def remove(self, requests: Collection[LiveRequest]) -> None:
        """Lets requests go."""
        gone = set(requests)
        self._running = [entry for entry in self._running if entry.live not in gone]
        self._waiting = [entry for entry in self._waiting if entry.live not in gone]

    def resize(self, num_blocks: int) -> bool:
        """Says no: memory does not change hands here."""
        return num_blocks == self.num_blocks

    # Steps ------------------------------------------------------------------------------------------------------------

    def schedule(self, max_steps: int = 1) -> SimStep | None:
        """A prompt, or else a step of all that decode and are not paused."""
        self._unfinished.require_room()
        preempted = self._make_room()
        entry = self._next_prompt()
        if entry is not None:
            chunk = Chunk(prefix_tokens=entry.computed, num_tokens=entry.live.num_tokens - entry.computed)
            entry.computed = entry.live.num_tokens
            self._last_step_s = None
            step = SimStep(
                batch=Batch(0, 0, (chunk,)), requests=(entry.live,), due=(entry.live,), admitted=(entry.live,),
                preempted=tuple(preempted), handle=[entry],
            )  # fmt: skip
            self._unfinished.begin(step.handle)
            return step
        return self._decode(preempted) if self._running else None

    def finish(self, step: SimStep, num_steps: int = 1) -> list[LiveRequest]:
        """Every request of the step has a token more; those that ended."""
        entries = self._unfinished.finish(step.handle)
        ended = []
        for entry in entries:
            live = entry.live
            if not live.num_generated:
                self._counts["total_prompt_tokens"] += live.arrival.prompt_tokens
            live.num_generated += 1
            if live.is_done:
                ended.append(live)
        self._counts["total_generated_tokens"] += len(entries)
        self._counts["step"] += 1
        self.remove(ended)
        return ended

    def _next_prompt(self) -> _Entry | None:
        if not self._waiting or len(self._running) >= self.capacity.max_num_seqs:
            return None
        entry = self._waiting[0]
        if self._blocks(entry.live.num_tokens + 1) > self.num_free:
            return None
        self._running.append(self._waiting.pop(0))
        return entry

    def _make_room(self) -> list[LiveRequest]:
        """The newest requests compute again where the batch has outgrown device and host, or one layer of it does."""
        preempted = []
        while len(self._running) > 1 and (self.num_free < 0 or not self._fits_away()):
            entry = self._running.pop()
            entry.computed, entry.spread, entry.paused_at_s = 0, RESIDENT, None
            entry.live.num_preemptions += 1
            self._counts["total_preemptions"] += 1
            self._waiting.insert(0, entry)
            preempted.append(entry.live)
        return preempted

    def _fits_away(self) -> bool:
        full = sum(entry.live.num_tokens // self.capacity.block_size for entry in self._running)
        return full + len(self._running) * self.machine.num_layers <= self.machine.num_cells

    def _decode(self, preempted: Sequence[LiveRequest]) -> SimStep:
        now_s = self._clock()
        views = [self._view(entry, now_s) for entry in self._running]
        placed = self._planner.place(views, self.machine, self._last_step_s)
        spreads = dict(placed.spreads)
        if not spreads or not self._fits(views, spreads):
            found = fallback([view for view in views if view.request_id not in placed.paused] or views, self.machine)
            spreads = dict(found.spreads)
        stepped = [entry for entry in self._running if entry.live.request_id in spreads]
        for entry in self._running:
            is_paused = entry.live.request_id not in spreads
            if is_paused and entry.paused_at_s is None:
                self.num_pauses += 1
                entry.paused_at_s = now_s
            elif not is_paused:
                entry.paused_at_s = None
        batch = Batch(len(stepped), sum(entry.live.num_tokens for entry in stepped))
        computed_s = self._times.step_s(batch)
        stalls_s = self._stall_s(stepped, spreads, computed_s)
        for entry in stepped:
            entry.computed = entry.live.num_tokens
        lives = tuple(entry.live for entry in stepped)
        step = SimStep(
            batch=batch, requests=lives, due=lives, preempted=tuple(preempted), stall_s=stalls_s, handle=stepped
        )
        self._unfinished.begin(stepped)
        self._last_step_s = computed_s + stalls_s
        return step

    def _stall_s(self, stepped: Sequence[_Entry], spreads: dict[str, Spread], computed_s: float) -> float:
        """Of a step with these spreads; what comes back to the device is copied too, once."""
        machine = self.machine
        staged, held, back = [0] * machine.num_layers, 0, [0] * machine.num_layers
        for entry in stepped:
            spread, full = spreads[entry.live.request_id], entry.live.num_tokens // machine.block_size
            away = spread.layers(machine.num_layers)
            held += cells_of(entry.live.num_tokens, spread, machine)
            for layer in away:
                staged[layer] += full
            if spread != entry.spread:
                for layer in set(entry.spread.layers(machine.num_layers)) - set(away):
                    back[layer] += full
                entry.spread = spread
        num_free = machine.num_cells - held
        found = stall_s(staged, computed_s / machine.num_layers, machine.cells_per_s, num_free)
        if any(back):  # into cells of their own, in the order of their layers
            both = [here + coming for here, coming in zip(staged, back, strict=True)]
            found = stall_s(both, computed_s / machine.num_layers, machine.cells_per_s, num_free + sum(back))
        self.stalled_s += found
        self.staged_cells += sum(staged)
        self.moved_cells += sum(back)
        return found

    def _fits(self, views: Sequence[Decode], spreads: dict[str, Spread]) -> bool:
        machine = self.machine
        staged, held = [0] * machine.num_layers, 0
        for view in views:
            spread = spreads.get(view.request_id)
            if spread is not None:
                held += cells_of(view.num_tokens, spread, machine)
                for layer in spread.layers(machine.num_layers):
                    staged[layer] += view.num_tokens // machine.block_size
        return held + max(staged) <= machine.num_cells

    def _view(self, entry: _Entry, now_s: float) -> Decode:
        live = entry.live
        return Decode(
            request_id=live.request_id,
            num_tokens=live.num_tokens,
            slo_s=live.arrival.tbt_s,
            deposit_tokens=live.deposit_tokens(now_s),
            paused_s=None if entry.paused_at_s is None else now_s - entry.paused_at_s,
            spread=entry.spread,
        )

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.capacity.block_size)
