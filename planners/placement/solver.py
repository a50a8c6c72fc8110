"""Which layers of which requests are on the host for the next steps, and who is paused: OrbitFlow sections 3.3 and 3.4.

    fewest SLOs missed  >  most tokens a second  >  least time of a step and bytes moved (`search`)

Where a placement would miss more SLOs than the cap allows, or serve fewer tokens a second than the requests that fit
on the device whole, requests are paused instead. So on a GPU that reads its own memory fast, and its host slowly, no
layer is away: there a paused request costs less than a stall of all the others.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from pengserve.planners.placement.latency import stall_s
from pengserve.planners.placement.pausing import Prospects, is_overdue, least_moved, victims
from pengserve.planners.placement.search import FEW_ROUNDS, MOST_ROUNDS, Found, Problem, Search, as_now, most_resident
from pengserve.planners.placement.spread import RESIDENT, Spread, mask_of
from pengserve.planners.placement.values import Decode, Machine, PlacementConfig, Solution

NOTHING_FITS = "not one layer of any request fits beside the blocks that are written"
WHOLE_WINDOWS = 4  # shortest windows for which all that are stepped fit: so long none is paused again


def solve(
    requests: Sequence[Decode],
    machine: Machine,
    config: PlacementConfig | None = None,
) -> Solution:
    """The placement for the next steps. Pure; takes milliseconds, so call it a step ahead, beside the steps.

    Args:
        requests: with the tokens that they will have when the solution is in force.
    """
    config = config or PlacementConfig()
    prospects = Prospects(requests, victims(requests, config), machine, config)
    return searched(requests, prospects).solution()


def searched(requests: Sequence[Decode], prospects: Prospects) -> "Candidate":
    """As `solve`, before it is known when it expires."""
    choice = _Choice(requests, prospects, prospects.after(prospects.config.min_window).best())
    window, found = choice.searched()
    if found is None or found.stall_s > 0:
        # The bound that chose who is paused spreads cells evenly. Few requests or layers cannot: then more are paused.
        count = choice.num_paused_without_stall(found, window)
        if count is not None:
            choice = _Choice(requests, prospects, count)
            window, found = choice.searched(FEW_ROUNDS)
    return Candidate(choice, found, window, choice.why(found) if found is not None else "")


def fallback(requests: Sequence[Decode], machine: Machine, config: PlacementConfig | None = None) -> Solution:
    """A placement that fits, at once: the widest distance for all, or none and those paused that do not fit whole."""
    config = config or PlacementConfig()
    prospects = Prospects(requests, victims(requests, config), machine, config)
    choice = _Choice(requests, prospects, prospects.after(config.min_window).at_once())
    found = most_resident(choice.problem(config.min_window))
    if found is None or found.stall_s > 0:
        count = choice.num_paused_without_stall(found, config.min_window)
        if count is not None:
            choice = _Choice(requests, prospects, count)
            found = most_resident(choice.problem(config.min_window))
    why = "one distance for all, until the search has ended"
    return Candidate(choice, found, config.min_window, why).solution()


def as_it_is(requests: Sequence[Decode], machine: Machine, config: PlacementConfig) -> "Candidate | None":
    """What is in force; None where it does not fit for a while, or a request was paused too long."""
    paused = [request for request in requests if not request.is_stepped]
    if len(paused) == len(requests) or any(is_overdue(request, config) for request in paused):
        return None
    choice = _Choice(requests, Prospects(requests, paused, machine, config), len(paused))
    found = as_now(choice.problem(config.min_window))
    return Candidate(choice, found, config.min_window, "what is in force stays") if found is not None else None


def whole(requests: Sequence[Decode], machine: Machine, config: PlacementConfig) -> "Candidate | None":
    """No layer is away, and as few requests are paused as that takes for some windows. As little changes as can.

    None where not one request fits whole.
    """
    prospects = Prospects(requests, least_moved(requests, machine, config), machine, config)
    counts = [prospects.after(windows * config.min_window).first_whole() for windows in (WHOLE_WINDOWS, 1)]
    count = next((count for count in counts if count is not None), None)
    if count is None:
        return None
    choice = _Choice(requests, prospects, count)
    found = most_resident(choice.problem(config.min_window))
    assert found is not None, "the bound that says so is exact where no layer is away"
    why = f"{count} paused and no layer away" if count else "all requests fit on the device"
    return Candidate(choice, found, config.min_window, why)


def predicted_s(requests: Sequence[Decode], machine: Machine, steps: int = 0) -> float:
    """Seconds of a step of these requests, with their spreads as they are, after so many others.

    Infinite where they do not fit.
    """
    if not requests:
        return 0.0
    return _Foretold(requests, [request.spread for request in requests], machine).step_s(steps)


class _Foretold:
    """What steps of the same requests take, one after the other."""

    def __init__(self, requests: Sequence[Decode], spreads: Sequence[Spread], machine: Machine) -> None:
        """There is one request at least."""
        self._machine = machine
        self._tokens = np.array([request.num_tokens for request in requests])
        self._masks = np.stack([mask_of(spread, machine.num_layers) for spread in spreads])

    def step_s(self, steps: int) -> float:
        """As `predicted_s`."""
        machine, tokens = self._machine, self._tokens + steps
        full = (tokens // machine.block_size).astype(np.float32)
        staged = (full @ self._masks).astype(np.int64)
        num_held = machine.num_layers * (int(full.sum()) + len(tokens)) - int(staged.sum())
        if num_held > machine.num_cells:
            return math.inf
        computed_s = machine.step_s + machine.context_s * float(tokens.sum())
        layer_s = computed_s / machine.num_layers
        if not staged.any():
            return computed_s
        computed_s += machine.staged_s
        return computed_s + stall_s(staged.tolist(), layer_s, machine.cells_per_s, machine.num_cells - num_held)


def cells_of(num_tokens: int, spread: Spread, machine: Machine) -> int:
    """Cells of the device that a request holds between steps; its block that is being filled is there in all layers."""
    num_away = len(spread.layers(machine.num_layers))
    return machine.num_layers + num_tokens // machine.block_size * (machine.num_layers - num_away)


def _computed_s(requests: Iterable[Decode], machine: Machine) -> float:
    return machine.step_s + machine.context_s * sum(request.num_tokens for request in requests)


class Candidate:
    """A placement that may become the solution. When it expires is looked for in the one that does alone."""

    def __init__(self, choice: "_Choice", found: Found | None, window: int, why: str) -> None:
        """`found`: None where nothing fits."""
        self._choice, self._found, self.window = choice, found, window
        self._why = why if found is not None else NOTHING_FITS
        self.num_stepped = len(choice.stepped)
        self.step_s = choice.step_s(found, window) if found is not None else math.inf
        self.num_late = choice.num_late(self.step_s) if found is not None else self.num_stepped + len(choice.paused)

    def num_moved(self) -> int:
        """Cells that come or go before it is in force, those of requests that go on among them."""
        machine = self._choice.machine
        back = [request for request in self._choice.stepped if not request.is_stepped]
        own = self._found.moved_cells if self._found is not None else 0
        return own + sum(r.num_tokens // machine.block_size for r in back) * machine.num_layers

    def solution(self) -> Solution:
        """In the words of the caller."""
        choice, config, found = self._choice, self._choice.config, self._found
        spreads = found.spreads if found is not None else (RESIDENT,) * self.num_stepped
        most_late = max(self.num_late, config.max_late)
        return Solution(
            spreads=tuple((r.request_id, spread) for r, spread in zip(choice.stepped, spreads, strict=True)),
            paused=tuple(request.request_id for request in reversed(choice.paused)),
            step_s=self.step_s,
            num_late=self.num_late,
            is_feasible=found is not None and self.num_late <= config.max_late,
            window=self.window,
            expires_in=choice.expiry(spreads, self.window, most_late) if found is not None else config.min_window,
            moved_cells=found.moved_cells if found is not None else 0,
            why=self._why,
        )


class _Choice:
    """Who is paused, and the placement of the others."""

    def __init__(self, requests: Sequence[Decode], prospects: Prospects, count: int) -> None:
        """`count`: so many of those that `prospects` pauses are paused, the first ones."""
        self.machine, self.config = prospects.machine, prospects.config
        self._prospects, self.count, self.paused = prospects, count, prospects.order[:count]
        ids = {request.request_id for request in self.paused}
        self.stepped = [request for request in requests if request.request_id not in ids]

    def searched(self, rounds: int = MOST_ROUNDS) -> tuple[int, Found | None]:
        """The window, and the best placement for it; None where none fits.

        A first round says whether the longer window will do: the others are for the one that is taken.
        """
        config, window = self.config, self.window()
        search = Search(self.problem(window))
        found = search.best(FEW_ROUNDS)
        if window > config.min_window and (
            found is None or self.num_late(self.step_s(found, window)) > config.max_late
        ):
            window, search = config.min_window, Search(self.problem(config.min_window), found)
            return window, search.best(max(FEW_ROUNDS, rounds - FEW_ROUNDS)) or found
        return window, search.best(rounds - FEW_ROUNDS)

    def num_paused_without_stall(self, found: Found | None, window: int) -> int | None:
        """How many to pause so that no layer is away, where that is better than `found`; else None."""
        prospect = self._prospects.after(self.config.min_window)
        count = prospect.first_whole()
        if count is None or count <= self.count:
            return None
        if found is None:
            return count
        step_s = self.step_s(found, window)
        here = prospect.value(self.num_late(step_s), len(self.stepped), step_s)
        there = prospect.value(int(prospect.num_late[count]), int(prospect.num_stepped[count]), prospect.step_s[count])
        return count if there < here else None

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
            staged_s=machine.staged_s,
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

    def step_s(self, found: Found, window: int) -> float:
        """Of a step at the end of the window."""
        return self._computed_s(window) + found.stall_s

    def num_late(self, step_s: float) -> int:
        """Requests that miss their SLO in such a step; paused ones without a deposit do."""
        lead_s = self.config.lead_s(self.machine)
        is_late = [r.slo_s is not None and step_s > r.slo_s for r in self.stepped]
        return sum(is_late) + sum(r.will_notice(lead_s) for r in self.paused)

    def why(self, found: Found) -> str:
        """One sentence for the log."""
        num_away = sum(spread.distance > 0 for spread in found.spreads)
        if num_away:
            return f"{num_away} requests keep layers away, {len(self.paused)} are paused"
        if not self.paused:
            return "all requests fit on the device"
        step_s = self._prospects.after(self.config.min_window).step_s
        said = f"{len(self.paused)} paused and no layer away"
        if math.isinf(step_s[0]):
            return f"{said}: all of them do not fit, not even one layer after the other"
        return (
            f"{said}: with layers of all of them away a step would take {step_s[0] * 1e3:.0f} ms,"
            f" and takes {step_s[self.count] * 1e3:.0f} ms"
        )

    def _computed_s(self, steps: int) -> float:
        return _computed_s(self.stepped, self.machine) + self.machine.context_s * steps * len(self.stepped)

    def expiry(self, chosen: Sequence[Spread], window: int, most_late: int) -> int:
        """Steps for which it fits and the cap holds, within four longest windows."""
        most = 4 * self.config.max_window
        if not self.stepped:
            return most
        foretold = _Foretold(self.stepped, chosen, self.machine)

        def is_good(steps: int) -> bool:
            step_s = foretold.step_s(steps)
            return math.isfinite(step_s) and self.num_late(step_s) <= most_late

        low = window
        while 2 * low <= most and is_good(2 * low):  # most end soon
            low *= 2
        high = min(most, 2 * low - 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if is_good(middle) else (low, middle - 1)
        return low
