"""Which layers of which requests are on the host for the next steps, and who is paused: OrbitFlow sections 3.3 and 3.4.

    fewest SLOs missed  >  most tokens a second  >  least time of a step and bytes moved (`search`)

Where a placement would miss more SLOs than the cap allows, or serve fewer tokens a second than the requests that fit
on the device whole, requests are paused instead. So on a GPU that reads its own memory fast, and its host slowly, no
layer is away: there a paused request costs less than a stall of all the others.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from pengserve.planners.placement.latency import stall_s
from pengserve.planners.placement.pausing import Prospects, victims
from pengserve.planners.placement.search import Found, Problem, most_resident, search
from pengserve.planners.placement.spread import RESIDENT, Spread, mask_of
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig, Solution


def solve(requests: Sequence[Decode], machine: Machine, config: PlacementConfig | None = None) -> Solution:
    """The placement for the next steps. Pure; takes milliseconds, so call it a step ahead, beside the steps.

    Args:
        requests: with the tokens that they will have when the solution is in force.
    """
    config = config or PlacementConfig()
    choice = _Choice(requests, machine, config)
    window = choice.window()
    found = search(choice.problem(window))
    if window > config.min_window and (found is None or choice.num_late(found, window) > config.max_late):
        window = config.min_window
        found = search(choice.problem(window)) or found
    return choice.said(found, window, choice.why(found)) if found is not None else choice.nothing()


def fallback(requests: Sequence[Decode], machine: Machine, config: PlacementConfig | None = None) -> Solution:
    """A placement that fits, at once: the widest distance for all, with as few paused as that takes."""
    config = config or PlacementConfig()
    choice = _Choice(requests, machine, config, fewest_paused=True)
    found = most_resident(choice.problem(config.min_window))
    if found is None:
        return choice.nothing()
    return choice.said(found, config.min_window, "one distance for all, until the search has ended")


def predicted_s(requests: Sequence[Decode], machine: Machine, steps: int = 0) -> float:
    """Seconds of a step of these requests, with their spreads as they are, after so many others.

    Infinite where they do not fit.
    """
    if not requests:
        return 0.0
    tokens = np.array([request.num_tokens for request in requests]) + steps
    masks = np.stack([mask_of(request.spread, machine.num_layers) for request in requests])
    full = (tokens // machine.block_size).astype(np.float32)
    staged = (full @ masks).astype(np.int64)
    num_held = machine.num_layers * (int(full.sum()) + len(requests)) - int(staged.sum())
    if num_held > machine.num_cells:
        return math.inf
    computed_s = machine.step_s + machine.context_s * float(tokens.sum())
    layer_s = computed_s / machine.num_layers
    return computed_s + stall_s(staged.tolist(), layer_s, machine.cells_per_s, machine.num_cells - num_held)


def cells_of(num_tokens: int, spread: Spread, machine: Machine) -> int:
    """Cells of the device that a request holds between steps; its block that is being filled is there in all layers."""
    num_away = len(spread.layers(machine.num_layers))
    return machine.num_layers + num_tokens // machine.block_size * (machine.num_layers - num_away)


def _computed_s(requests: Iterable[Decode], machine: Machine) -> float:
    return machine.step_s + machine.context_s * sum(request.num_tokens for request in requests)


class _Choice:
    """Who is paused, and the placement of the others."""

    def __init__(
        self,
        requests: Sequence[Decode],
        machine: Machine,
        config: PlacementConfig,
        *,
        fewest_paused: bool = False,
    ) -> None:
        self.machine, self.config = machine, config
        order = victims(requests, config)
        self._prospects = Prospects(requests, order, machine, config)
        prospect = self._prospects.after(config.min_window)
        self.count = prospect.first_that_fits() if fewest_paused else prospect.best()
        self.paused = order[: self.count]
        ids = {request.request_id for request in self.paused}
        self.stepped = [request for request in requests if request.request_id not in ids]

    def problem(self, window: int) -> Problem:
        """For the search: sizes are those at the end of the window."""
        machine, size = self.machine, self.machine.block_size
        full = tuple((request.num_tokens + window) // size for request in self.stepped)
        return Problem(
            full=full,
            num_spare=machine.num_cells - (sum(full) + len(full)) * machine.num_layers,
            num_layers=machine.num_layers,
            layer_s=self._computed_s(window) / machine.num_layers,
            cells_per_s=machine.cells_per_s,
            window=window,
            now=tuple(request.spread for request in self.stepped),
            can_leave_free=tuple(request.is_on_host for request in self.stepped),
        )

    def window(self) -> int:
        """The longest window in which a step is hardly longer, and no more SLOs are missed, than in the shortest.

        OrbitFlow's self-determined decode window: short where the margin is, long where nothing is at stake.
        """
        config = self.config
        first = self._prospects.after(config.min_window)
        window, step_s, num_late = config.min_window, first.step_s[self.count], first.num_late[self.count]
        while window < config.max_window:
            longer = min(2 * window, config.max_window)
            later = self._prospects.after(longer)
            is_longer = later.step_s[self.count] > step_s * (1.0 + config.min_gain)
            if is_longer or later.num_late[self.count] > num_late:
                break
            window = longer
        return window

    def num_late(self, found: Found, window: int) -> int:
        """Requests that miss their SLO in a step at the end of the window; paused ones without a deposit do."""
        return self._num_late(self._computed_s(window) + found.stall_s)

    def said(self, found: Found, window: int, why: str) -> Solution:
        """A placement in the words of the caller."""
        step_s = self._computed_s(window) + found.stall_s
        num_late = self._num_late(step_s)
        return Solution(
            spreads=tuple((r.request_id, spread) for r, spread in zip(self.stepped, found.spreads, strict=True)),
            paused=tuple(request.request_id for request in reversed(self.paused)),
            step_s=step_s,
            num_late=num_late,
            is_feasible=num_late <= self.config.max_late,
            window=window,
            expires_in=self._expiry(found.spreads, window, max(num_late, self.config.max_late)),
            moved_cells=found.moved_cells,
            why=why,
        )

    def nothing(self) -> Solution:
        """Where nothing fits."""
        return Solution(
            spreads=tuple((request.request_id, RESIDENT) for request in self.stepped),
            paused=tuple(request.request_id for request in reversed(self.paused)),
            step_s=math.inf,
            num_late=len(self.stepped) + len(self.paused),
            is_feasible=False,
            window=self.config.min_window,
            expires_in=self.config.min_window,
            moved_cells=0,
            why="not one layer of any request fits beside the blocks that are written",
        )

    def why(self, found: Found) -> str:
        """One sentence for the log."""
        num_away = sum(spread.distance > 0 for spread in found.spreads)
        if num_away:
            return f"{num_away} requests keep layers away, {len(self.paused)} are paused"
        if not self.paused:
            return "all requests fit on the device"
        step_s = self._prospects.after(self.config.min_window).step_s
        return (
            f"{len(self.paused)} paused and no layer away: with layers of all of them away a step would take"
            f" {step_s[0] * 1e3:.0f} ms, and takes {step_s[self.count] * 1e3:.0f} ms"
        )

    def _computed_s(self, steps: int) -> float:
        return _computed_s(self.stepped, self.machine) + self.machine.context_s * steps * len(self.stepped)

    def _num_late(self, step_s: float) -> int:
        is_late = [r.slo_s is not None and step_s > r.slo_s for r in self.stepped]
        return sum(is_late) + sum(r.slo_s is not None and r.deposit_tokens == 0 for r in self.paused)

    def _expiry(self, chosen: Sequence[Spread], window: int, most_late: int) -> int:
        """Steps for which it fits and the cap holds, within four longest windows."""
        placed = [replace(r, spread=spread) for r, spread in zip(self.stepped, chosen, strict=True)]
        low, high = window, 4 * self.config.max_window
        while low < high:
            middle = (low + high + 1) // 2
            step_s = predicted_s(placed, self.machine, middle)
            is_good = math.isfinite(step_s) and self._num_late(step_s) <= most_late
            low, high = (middle, high) if is_good else (low, middle - 1)
        return low
