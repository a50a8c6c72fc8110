"""Which layers of which requests are on the host, and who is paused, while SLOs hold and KV is short: OrbitFlow's loop.

    before a step   what a search has found is carried out; if what is in force does not fit any more, the fallback is
    beside it       the next search, a step ahead, in a thread of its own
    after it        what it took: the figures follow, and a step that drifts asks for a new search

`planners/placement` decides. Here it is told of requests and steps, and the lane's residency does what it says: layers
are placed, and requests that are paused are parked. Nothing happens, and nothing is measured, while no request here has
an SLO for its tokens.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pengserve.planners.placement.pausing import is_overdue
from pengserve.planners.placement.solver import fallback, predicted_s, whole
from pengserve.planners.placement.spread import Spread
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig, Solution
from pengserve.planners.placement.watch import SMOOTHING, InForce, moved, reason_to_solve
from pengserve.planners.types.placements import PlacementNote
from pengserve.replicas.engine.placement.early_offload import EarlyOffload
from pengserve.replicas.engine.placement.lane_view import LaneView
from pengserve.replicas.engine.placement.placement_notes import PlacementNotes
from pengserve.replicas.engine.placement.placement_search import PlacementSearch, Searched
from pengserve.replicas.engine.placement.slo_gate import Contracts
from pengserve.replicas.engine.placement.step_figures import StepFigures
from pengserve.replicas.engine.scheduling.scheduler_handle import SchedulerHandle
from pengserve.replicas.engine.tiers.residency import ResidentRequests

LEAD_STEPS = 8  # before its deposit is spent a paused request counts as one whose client notices
AHEAD = 1  # steps that are made before a search has ended
PROMPTS = "prompts are being computed (LayerKV Eq. 4)"
SEARCH_SHARE = 0.05  # of the time that searches may take
MAX_REST_S = 1.0  # between two of them, however long one has taken
RELEASE_STEPS = 32  # for so many everything must fit on the device before layers come back without a search


class SloPlacement:
    """Belongs to the step thread of the member that schedules."""

    def __init__(
        self,
        scheduler: SchedulerHandle,
        residency: ResidentRequests,
        contracts: Contracts,
        notes: PlacementNotes,
        early: EarlyOffload,
        *,
        shape: str = "dp",
        config: PlacementConfig | None = None,
        search: PlacementSearch | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler, self._residency, self._tiers = scheduler, residency, residency.tiers
        self._contracts, self._notes, self._early, self._shape = contracts, notes, early, shape
        self._config, self._clock = config or PlacementConfig(lead_steps=LEAD_STEPS), clock
        self._search = search or PlacementSearch()
        residency.turn_s = self._config.max_paused_s
        self._view = LaneView(scheduler, residency, contracts)
        self._figures = StepFigures(residency.tiers.num_layers, residency.tiers.block_size)
        self._force: InForce | None = None  # None: KV is not short, and nothing is arranged
        self._spreads: dict[str, Spread] = {}  # of requests with layers on the host
        self._planned: tuple[Sequence[Decode], Machine] | None = None  # for the step under way
        self._drift = 1.0  # of late: a step's time, divided by what was predicted
        self._age = 0  # steps since the placement changed
        self._rests_until_s = -math.inf  # no search begins before that
        self.num_changes = 0  # that searches made

    @property
    def is_on(self) -> bool:
        """Whether a request here has an SLO for its tokens, or something is arranged still."""
        return self._contracts.num_paced > 0 or self._force is not None or bool(self._spreads)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step, and around the residency's choice for it."""
        self.before()
        prompts, stalled_s, started_s = self._view.prompt_tokens(), self._tiers.stall_s, self._clock()
        num_staged = self._tiers.num_staged_steps
        yield
        if self._view.prompt_tokens() == prompts:
            is_staged = self._tiers.num_staged_steps > num_staged
            self.after(self._clock() - started_s, self._tiers.stall_s - stalled_s, is_staged=is_staged)

    def close(self) -> None:
        """Ends the thread of searches."""
        self._search.close()

    # Before a step ----------------------------------------------------------------------------------------------------

    def before(self) -> None:
        """Carries out what has been found, and asks for what is needed."""
        if self._force is not None:
            self._force = replace(self._force, age=self._force.age + 1)
        self._age += 1
        self._planned = None
        if not self._contracts.num_paced:
            self._release()
        elif self._has_room():
            if self._search.take() is not None or self._force is not None:
                self._residency.arrange((), (), {})
                self._force, self._age = None, self._tiers.block_size
            if self._age >= self._tiers.block_size:  # a stage of LayerKV's forecast
                self._look_ahead()
        elif not (requests := self._decodes()):
            self._release()
        elif (machine := self._machine(requests)) is not None:
            self._offload(self._early.of_prompts(requests, machine, self._config), PROMPTS)
            self._plan(requests, machine)

    def _plan(self, requests: Sequence[Decode], machine: Machine) -> None:
        """KV is short: OrbitFlow's loop."""
        if (found := self._search.take()) is not None:
            self._rests_until_s = self._clock() + min(MAX_REST_S, found.took_s / SEARCH_SHARE)
            if self._take(found, requests):
                requests = self._decodes()
        reason = self._reason(requests, machine)
        if reason and not self._fits(requests, machine):
            self._fall_back(requests, machine, reason)
            requests = self._decodes()
        self._planned = requests, machine
        if reason and not self._search.is_busy and self._may_search(requests):
            ahead = [self._ahead(request) for request in requests]
            self._search.begin(ahead, machine, self._config, reason)

    def _may_search(self, requests: Sequence[Decode]) -> bool:
        """Whether searches have taken little of the time so far: they share the interpreter with the steps."""
        return self._clock() >= self._rests_until_s or any(is_overdue(r, self._config) for r in requests)

    def _look_ahead(self) -> None:
        """KV is not short: layers leave where it will be, and come back where it will not."""
        self._age = 0
        requests = self._decodes()
        machine = self._machine(requests)
        missing = self._early.missing(requests, machine) if machine is not None else 0
        if machine is None or not missing:
            self._release()
            return
        missing -= sum(self._num_left(request, machine) for request in requests) // machine.num_layers
        spreads = self._early.of_decodes(missing, requests, machine, self._config)
        self._offload(spreads, f"{missing} blocks will be missing (LayerKV Eq. 5)")

    def _num_left(self, request: Decode, machine: Machine) -> int:
        """Cells that the layers of a request that are on the host have left."""
        return len(request.spread.layers(machine.num_layers)) * (request.num_tokens // machine.block_size)

    def _offload(self, spreads: Mapping[str, Spread], reason: str) -> None:
        """Layers leave early."""
        if not spreads:
            return
        num_layers = self._tiers.num_layers
        for request_id, spread in spreads.items():
            self._residency.spread(request_id, spread.layers(num_layers))
            self._spreads[request_id] = spread
        why = (
            f"{sum(len(s.layers(num_layers)) for s in spreads.values())} layers of {len(spreads)} requests leave early"
        )
        self._notes.add(PlacementNote(number=0, reason=reason, why=why, shape=self._shape, num_away=len(spreads)))

    def _has_room(self) -> bool:
        """Whether all KV is on the device, and fits there for a while."""
        steps = self._config.min_window if self._force is None else RELEASE_STEPS
        num_growing = len(self._scheduler.running) + len(self._scheduler.holding)
        blocks = self._residency.num_held_blocks + num_growing * (self._view.blocks(steps) + 1)
        return blocks * self._tiers.num_layers + self._view.prompt_cells() <= self._residency.num_cells

    def _ahead(self, request: Decode) -> Decode:
        """As it will be when the search has ended."""
        full = request.num_tokens // self._tiers.block_size
        is_saved = self._tiers.is_saved(self._scheduler.block_ids(request.request_id)[:full])
        return replace(request, num_tokens=request.num_tokens + AHEAD, is_on_host=is_saved)

    def _reason(self, requests: Sequence[Decode], machine: Machine) -> str:
        """Why a new search is needed; empty where what is in force stands."""
        config, force = self._config, self._force
        stepped = [request for request in requests if request.paused_s is None]
        # A single step says little on a busy machine, and one that moves KV takes longer once.
        is_settled = self._age >= config.min_window
        step_s = predicted_s(stepped, machine) * (self._drift if is_settled else 1.0)
        if not math.isfinite(step_s):
            return "what is stepped does not fit any more"
        if reason := reason_to_solve(force, requests, step_s, machine, config):
            return reason
        waiting = [r for r in requests if r.request_id in self._residency.paused]
        longest_s = max((r.paused_s or 0.0 for r in waiting), default=0.0)
        if longest_s >= config.max_paused_s and force is not None and force.age >= config.min_window:
            return f"a request has been paused for {longest_s:.1f} s"
        # Another could be paused instead and not be missed for a while. Else taking turns moves KV for nothing. Whose
        # deposit is spent has missed its SLO already.
        can_swap = any(r.deposit_tokens >= config.min_window for r in stepped)
        lead_s = config.lead_s(machine)
        if is_settled and can_swap and any(r.will_notice(lead_s) for r in waiting):
            return "the deposit of a paused request is nearly spent"
        return ""

    def _fits(self, requests: Sequence[Decode], machine: Machine) -> bool:
        """Whether the requests that are not paused can be stepped as they are."""
        stepped = [request for request in requests if request.request_id not in self._residency.paused]
        return bool(stepped) and math.isfinite(predicted_s(stepped, machine, AHEAD))

    # What is in force -------------------------------------------------------------------------------------------------

    def _take(self, found: Searched, requests: Sequence[Decode]) -> bool:
        """Carries out what a search has found, for the requests that are still here; whether that changes anything."""
        solution = found.solution
        if solution is None:
            self._note(found, None)
            return False
        here = {request.request_id: request for request in requests}
        asked = frozenset((*dict(solution.spreads), *solution.paused))
        spreads = tuple((i, spread) for i, spread in solution.spreads if i in here)
        solution = replace(solution, spreads=spreads, paused=tuple(i for i in solution.paused if i in here))
        if not spreads or not math.isfinite(solution.step_s):
            return False  # nothing fits: the residency steps what it can
        if not self._carry_out(solution, requests, asked):
            return False
        self.num_changes += 1
        self._note(found, solution)
        return True

    def _fall_back(self, requests: Sequence[Decode], machine: Machine, reason: str) -> None:
        """At once, what fits: until the search has ended. Layers leave for it only where not one request fits whole."""
        there = whole(requests, machine, self._config)
        found = there.solution() if there is not None else fallback(requests, machine, self._config)
        asked = frozenset(request.request_id for request in requests)
        if math.isfinite(found.step_s) and self._carry_out(found, requests, asked):
            self._note(Searched(solution=found, reason=reason, took_s=0.0), found)

    def _carry_out(self, solution: Solution, requests: Sequence[Decode], asked: frozenset[str]) -> bool:
        """Makes a solution be in force; whether that changes anything."""
        placed, paused = moved(solution, requests), frozenset(solution.paused)
        is_other = bool(placed) or any(
            r.is_stepped is (r.request_id in paused) for r in requests if r.request_id in asked
        )
        if is_other or paused != self._residency.paused:
            num_layers = self._tiers.num_layers
            layers = {i: spread.layers(num_layers) for i, spread in placed.items()}
            self._residency.arrange(dict(solution.spreads), solution.paused, layers)
        if is_other:
            spreads = self._spreads | placed
            self._spreads = {i: s for i, s in spreads.items() if s.distance and self._scheduler.knows(i)}
            self._age = 0
        self._force = InForce(solution=solution, request_ids=asked)
        self._drift = 1.0
        return is_other

    def _release(self) -> None:
        """All KV is to be on the device, and all requests may be stepped."""
        if self._search.take() is None and self._force is None and not self._spreads:
            return
        here = {i: () for i in self._spreads if self._scheduler.knows(i)}
        self._residency.arrange((), (), here)
        self._spreads, self._force = {}, None

    def _note(self, found: Searched, solution: Solution | None) -> None:
        stepped = solution.spreads if solution is not None else ()
        failed = f"the search failed ({found.failure}): what was in force stays"
        self._notes.add(
            PlacementNote(
                number=0,
                reason=found.reason,
                why=solution.why if solution is not None else failed,
                shape=self._shape,
                num_stepped=len(stepped),
                num_away=solution.num_away if solution is not None else 0,
                num_paused=len(solution.paused) if solution is not None else 0,
                step_s=solution.step_s if solution is not None else 0.0,
                num_late=solution.num_late if solution is not None else 0,
                moved_bytes=(solution.moved_cells if solution is not None else 0) * self._tiers.cell_bytes,
                solved_s=found.took_s if solution is not None else 0.0,
            )
        )

    # What there is ----------------------------------------------------------------------------------------------------

    def after(self, took_s: float, stalled_s: float, *, is_staged: bool) -> None:
        """A step of decoding alone took so long, of which layers waited for copies; whether any was staged."""
        if is_staged:
            self._learn_staged(took_s)
        else:
            context = sum(request.num_computed_tokens for request in self._scheduler.running)
            self._figures.learn(took_s - stalled_s, context)
        if self._force is None or self._planned is None:
            return
        foretold_s = _foretold_s(*self._planned)
        if 0 < foretold_s < math.inf:
            self._drift += SMOOTHING * (took_s / foretold_s - self._drift)

    def _learn_staged(self, took_s: float) -> None:
        """How much longer a step with staged layers took than one without that waits for its copies as predicted."""
        requests, machine = self._planned or (decodes := self._decodes(), self._machine(decodes))
        if machine is None:
            return
        foretold_s = _foretold_s(requests, replace(machine, staged_s=0.0))
        if 0 < foretold_s < math.inf:
            self._figures.learn_staged(took_s - foretold_s)

    def _machine(self, requests: Sequence[Decode]) -> Machine | None:
        """What requests that decode have of it; None before a step was measured."""
        return self._figures.machine(self._view.num_cells(requests), self._tiers.cells_per_s)

    def _decodes(self) -> list[Decode]:
        return self._view.decodes(self._spreads)


def _foretold_s(requests: Sequence[Decode], machine: Machine) -> float:
    """What was predicted for the step under way."""
    return predicted_s([request for request in requests if request.paused_s is None], machine)
