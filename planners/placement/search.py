"""The best spreads for a batch of requests and a window of steps: a local search, exact where there are few choices.

What a step takes depends on the spreads by three figures alone: the cells that each layer stages, the cells that are
free for that (each cell that is away is one more), and the bytes that a new placement moves first. So a change of one
request is a row of `layers` numbers, and a round looks at thousands of changes at once: numpy bounds them all from
below (`least_stalls_s`), and `stall_s` prices the most promising ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.placement.latency import Cells, Seconds, least_stalls_s, stall_s
from pengserve.planners.placement.options import layers_of_options, masks, moves, numbers
from pengserve.planners.placement.spread import (
    RESIDENT,
    Spread,
    distances,
    mask_of,
    spreads,
    uniform_spreads,
)

MOST_EXHAUSTIVE = 1 << 16  # numbers of all placements together up to which all of them are looked at
MOST_NUMBERS = 1 << 14  # of one round
MOST_ROUNDS = 4
FEW_ROUNDS = 1  # of a first look, or of a search after another one
MOST_PRICED = 3  # changes of a round


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A batch, as the search sees it. Requests are in the order of `full`."""

    full: tuple[int, ...]  # blocks of each request that may be on the host alone, by the end of the window
    num_spare: int  # cells that are left with all of them on the device; negative where they do not fit
    num_layers: int
    layer_s: float
    cells_per_s: float
    window: int  # steps
    now: tuple[Spread, ...]  # how they are
    can_leave_free: tuple[bool, ...]  # the host has a copy of their full blocks
    staged_s: float = 0.0  # more for each step in which a layer is staged


@dataclass(frozen=True, slots=True)
class Found:
    """A placement and what it costs."""

    spreads: tuple[Spread, ...]
    stall_s: float  # of each step, `staged_s` included
    moved_cells: int  # over the link, before it is in force
    cost_s: float  # of the window: all stalls, and the move


class Search:
    """One search, which goes on for as many rounds as are asked for."""

    def __init__(self, problem: Problem, near: Found | None = None) -> None:
        """`near`: of the same requests, what a search has found for another window."""
        self._state, self._is_over = _State(problem), True
        options = spreads(problem.num_layers)
        if problem.num_spare >= 0 and all(spread == RESIDENT for spread in problem.now):
            self._state.found([RESIDENT] * len(problem.full))
        elif len(options) ** len(problem.full) * problem.num_layers <= MOST_EXHAUSTIVE:
            self._state.best_of_all()
        else:
            for start in (problem.now, near.spreads if near is not None else _spread_out(problem)):
                self._state.found(start)
            self._state.try_uniform()
            self._is_over = False

    def best(self, rounds: int = MOST_ROUNDS) -> Found | None:
        """The best placement after so many more rounds at most; None where none fits. It is never worse than one spread
        for all requests.
        """
        if not self._is_over:
            self._is_over = not self._state.descend(rounds)
        return self._state.best


def most_resident(problem: Problem) -> Found | None:
    """The widest distance for all requests that fits, at once: what is in force until a search has ended.

    None where none fits.
    """
    state = _State(problem)
    for distance in (0, *reversed(distances(problem.num_layers))):
        spread = Spread(distance, distance - 1) if distance else RESIDENT
        chosen = [spread] * len(problem.full)
        if state.has_room(state.staged(chosen)):
            return state.found(chosen)
    return None


def as_now(problem: Problem) -> Found | None:
    """The placement that is in force; None where it does not fit."""
    state = _State(problem)
    staged = state.staged(problem.now)
    return state.priced(problem.now, staged, 0) if state.has_room(staged) else None


class _State:
    """One search. `best` is the best placement that was priced so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.full = np.array(problem.full, dtype=np.float32)
        self.best: Found | None = None
        self._option = numbers(problem.num_layers)
        self._masks = masks(problem.num_layers)
        self._now = [self._option.get(spread) for spread in problem.now]
        self._turn = self._num_vain = 0  # rounds so far, and those of them of late that found nothing

    @cached_property
    def _moved(self) -> NDArray[np.float32]:
        """Cells that each request moves for each option, `[requests, options]`."""
        num_layers, now, free = self.problem.num_layers, self.problem.now, self.problem.can_leave_free
        rows = [moves(spread, num_layers, is_free) for spread, is_free in zip(now, free, strict=True)]
        return np.stack(rows) * self.full[:, None]

    # Prices -----------------------------------------------------------------------------------------------------------

    def found(self, chosen: Sequence[Spread]) -> Found:
        """A placement with its price."""
        staged = self.staged(chosen)
        return self.priced(chosen, staged, self._moved_by(chosen))

    def has_room(self, staged: Cells) -> bool:
        """Whether a placement leaves room for the layer that stages most."""
        return int(staged.max(initial=0)) <= self.problem.num_spare + int(staged.sum())

    def staged(self, chosen: Sequence[Spread]) -> Cells:
        """Cells that each layer stages."""
        found: Cells = self.full @ self._masks[[self._option.get(spread, 0) for spread in chosen]]
        for spread, count in zip(chosen, self.problem.full, strict=True):
            if spread not in self._option:  # it is how it was, with a distance that the search would not choose
                found[spread.phase :: spread.distance] += count
        return found

    def _moved_by(self, chosen: Sequence[Spread]) -> int:
        known = [(request, self._option[spread]) for request, spread in enumerate(chosen) if spread in self._option]
        requests, options = zip(*known, strict=True) if known else ((), ())
        return int(self._moved[list(requests), list(options)].sum())

    def priced(self, chosen: Sequence[Spread], staged: Cells, moved: int) -> Found:
        """As `found`, where it is known how many cells are staged and move."""
        problem = self.problem
        num_free = problem.num_spare + int(staged.sum())
        if num_free < 0:
            stall = float("inf")
        else:
            stall = stall_s(staged.tolist(), problem.layer_s, problem.cells_per_s, num_free)
            stall += problem.staged_s * bool(staged.any())
        cost_s = stall * problem.window + moved / problem.cells_per_s
        found = Found(tuple(chosen), stall, moved, cost_s)
        if cost_s < (self.best.cost_s if self.best is not None else float("inf")):
            self.best = found
        return found

    def _least(self, staged: Cells, moved: NDArray[np.float32]) -> Seconds:
        """What each of many placements costs at least."""
        problem = self.problem
        num_free = problem.num_spare + staged.sum(axis=1)
        stalls = least_stalls_s(staged, problem.layer_s, problem.cells_per_s, num_free)
        if problem.staged_s:
            stalls = stalls + problem.staged_s * staged.any(axis=1)
        return stalls * problem.window + moved / problem.cells_per_s

    # All placements ---------------------------------------------------------------------------------------------------

    def best_of_all(self) -> Found | None:
        """The best of all placements: those that could be best are priced, the most promising first."""
        options, count = spreads(self.problem.num_layers), len(self.problem.full)
        grid = np.indices((len(options),) * count).reshape(count, -1).T
        staged = (self._masks[grid] * self.full[None, :, None]).sum(axis=1)
        moved = self._moved[np.arange(count), grid].sum(axis=1)
        least = self._least(staged, moved)
        for row in np.argsort(least, kind="stable").tolist():
            if not least[row] < self._best_s():
                break
            self.priced([options[index] for index in grid[row]], staged[row], int(moved[row]))
        return self.best

    def _best_s(self) -> float:
        return self.best.cost_s if self.best is not None else float("inf")

    # Local search -----------------------------------------------------------------------------------------------------

    def descend(self, rounds: int) -> bool:
        """Changes one request at a time, for the best; whether more rounds could help."""
        if self.best is None:
            return False
        groups, here = self._groups, self.best
        staged = self.staged(here.spreads)
        for _ in range(rounds):
            changed = self._best_change(here, staged, groups[self._turn % len(groups)])
            self._turn += 1
            self._num_vain = self._num_vain + 1 if changed is None else 0
            if self._num_vain == len(groups):
                return False
            if changed is not None:
                here, staged = changed, self.staged(changed.spreads)
        return True

    @cached_property
    def _groups(self) -> list[NDArray[np.int64]]:
        """Requests that rounds look at in turns, the largest ones first."""
        width = (len(distances(self.problem.num_layers)) + 2) * self.problem.num_layers
        size = max(1, MOST_NUMBERS // width)
        order = np.argsort(-self.full, kind="stable")
        return [order[first : first + size] for first in range(0, len(order), size)]

    def _best_change(self, here: Found, all_staged: Cells, requests: NDArray[np.int64]) -> Found | None:
        """The best change of one of `requests`, if it is better than what is."""
        chosen = here.spreads
        others = all_staged - np.array(
            [mask_of(chosen[request], self.problem.num_layers) * self.full[request] for request in requests]
        )
        picks = self._best_phases(others, requests)
        staged = others[:, None, :] + self._masks[picks] * self.full[requests, None, None]
        moved_others = here.moved_cells - np.array([self._moved_of(r, chosen[r]) for r in requests])
        moved = moved_others[:, None] + self._moved[requests[:, None], picks]
        rows = staged.reshape(-1, self.problem.num_layers)
        least = self._least(rows, moved.ravel())
        best: Found | None = None
        for row in np.argsort(least, kind="stable")[:MOST_PRICED].tolist():
            if not least[row] < min(here.cost_s, best.cost_s if best is not None else here.cost_s):
                break
            request, pick = divmod(row, picks.shape[1])
            changed = list(chosen)
            changed[int(requests[request])] = spreads(self.problem.num_layers)[picks[request, pick]]
            found = self.priced(changed, rows[row], int(moved.ravel()[row]))
            if found.cost_s < (best.cost_s if best is not None else here.cost_s):
                best = found
        return best

    def _moved_of(self, request: int, spread: Spread) -> int:
        index = self._option.get(spread)
        return 0 if index is None else int(self._moved[request, index])

    def _best_phases(self, others: Cells, requests: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each request the option that it has now, `RESIDENT`, and of each distance the phase with the least peak.

        Args:
            others: `[requests, layers]`, what all but the request stage.

        Returns:
            Indices of `spreads`, `[requests, distances + 2]`.
        """
        columns = [np.zeros(len(requests), dtype=np.int64)]
        columns.append(np.array([self._now[request] or 0 for request in requests]))
        layers, starts = layers_of_options(self.problem.num_layers)
        peaks = np.maximum.reduceat(others[:, layers], starts, axis=1)  # of all options but `RESIDENT`
        first = 0
        for distance in distances(self.problem.num_layers):
            stop = first + distance
            # Of equal peaks the latest phase: its layers are needed later.
            columns.append(stop - peaks[:, first:stop][:, ::-1].argmin(axis=1))
            first = stop
        return np.stack(columns, axis=1)

    def try_uniform(self) -> None:
        """Prices each placement with one spread for all requests that could be better than the best."""
        num_layers = self.problem.num_layers
        # Where layers are away already, the phase that moves least may be any.
        options = spreads(num_layers) if any(s.distance for s in self.problem.now) else uniform_spreads(num_layers)
        rows = np.array([self._option[spread] for spread in options])
        staged = self._masks[rows] * int(self.full.sum())
        moved = self._moved[:, rows].sum(axis=0)
        least = self._least(staged, moved)
        for row in np.argsort(least, kind="stable").tolist():
            if not least[row] < self._best_s():
                break
            self.priced([options[row]] * len(self.full), staged[row], int(moved[row]))


def _spread_out(problem: Problem) -> list[Spread]:
    """About equally many cells staged in each layer, as few as leave room for two layers to take turns.

    The largest requests have the smaller one of two neighbouring distances, the others the wider one.
    """
    num_layers, sizes = problem.num_layers, problem.full
    needed = max(0, -problem.num_spare) * num_layers / max(1, num_layers - 2)  # staged cells, and so free ones
    by_distance = [sum(sizes) * (num_layers // distance) for distance in distances(num_layers)]
    closer = max((index for index, cells in enumerate(by_distance) if cells >= needed), default=0)
    wider = closer + 1
    choices = (*distances(num_layers), 0)
    total = by_distance[wider] if wider < len(by_distance) else 0
    staged = np.zeros(2 * num_layers, dtype=np.float32)  # beyond the layers there is nothing
    chosen = [RESIDENT] * len(sizes)
    for request in sorted(range(len(sizes)), key=lambda r: -sizes[r]):
        distance = choices[closer] if total < needed else choices[wider]
        if not distance:
            continue
        if total < needed:
            others = num_layers // choices[wider] if choices[wider] else 0
            total += sizes[request] * (num_layers // distance - others)
        spread = Spread(distance, _least_peak(staged[: -(-num_layers // distance) * distance], distance))
        staged[spread.phase : num_layers : distance] += sizes[request]
        chosen[request] = spread
    return chosen


def _least_peak(staged: Cells, distance: int) -> int:
    """The phase whose layers have the least peak; of equals the latest. So many layers are a multiple of `distance`."""
    peaks = np.maximum.reduce(staged.reshape(-1, distance))
    return distance - 1 - int(peaks[::-1].argmin())
