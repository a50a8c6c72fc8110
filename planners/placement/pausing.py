"""Who is paused first, and what pausing so many of them promises, before any placement is searched.

A paused request frees its cells and its share of the link; its client goes on for as long as its deposit lasts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.placement.values import Decode, Machine, PlacementConfig


def victims(requests: Sequence[Decode], config: PlacementConfig) -> list[Decode]:
    """All that may be paused, in that order: much KV, and much time until the client notices. One is always stepped.

    OrbitFlow section 3.4 adds KV blocks and deposited tokens; here KV is multiplied by slack. None starves: after
    `max_paused_s` a request is paused only behind all others, of several the one that has been paused for longest
    last. So it has its turn, and keeps its place for a while (`may_pause`).
    """
    return _in_order(requests, config, lambda r: (-kv_times_slack(r), r.request_id))


def slack_s(request: Decode) -> float:
    """How long its client bears a pause, less the longer it has lasted; of one without an SLO a second."""
    slo_s = 1.0 if request.slo_s is None else request.slo_s
    return (request.deposit_tokens + 1) * slo_s / (1.0 + (request.paused_s or 0.0))


def kv_times_slack(request: Decode) -> float:
    """What pausing it frees, for as long as its client bears that: tokens times seconds."""
    return request.num_tokens * slack_s(request)


def least_moved(requests: Sequence[Decode], machine: Machine, config: PlacementConfig) -> list[Decode]:
    """As `victims`, so that as little changes as can: first those that are paused, the least urgent first, then those
    that run whose clients do not notice, and those that do.
    """

    lead_s = config.lead_s(machine)

    def key(request: Decode) -> tuple[bool, bool, int, float, str]:
        band, arrived_s = request.rank
        return request.is_stepped, request.will_notice(lead_s), -band, -arrived_s, request.request_id

    return _in_order(requests, config, key)


def is_overdue(request: Decode, config: PlacementConfig) -> bool:
    """Whether a request has been paused for so long that it comes before others."""
    return request.paused_s is not None and request.paused_s >= config.max_paused_s


def _in_order(requests: Sequence[Decode], config: PlacementConfig, key: Callable[[Decode], Any]) -> list[Decode]:
    if not config.may_pause:
        return []
    able = [r for r in requests if r.may_pause]
    willing = sorted((r for r in able if not is_overdue(r, config)), key=key)
    overdue = sorted((r for r in able if is_overdue(r, config)), key=lambda r: (r.paused_s, r.request_id))
    protected = [r for r in requests if not r.may_pause]
    return [*willing, *overdue, *protected][: max(0, len(requests) - 1)]


@dataclass(frozen=True, slots=True)
class Prospect:
    """What it comes to by how many are paused, the first victims: arrays `[victims + 1]`."""

    step_s: NDArray[np.float64]  # at least; infinite where not even one layer of all fits
    num_late: NDArray[np.int64]
    num_stepped: NDArray[np.int64]
    gain: NDArray[
        np.float64
    ]  # what tokens a second are divided by: pausing none is preferred, some beside layers away not
    is_whole: NDArray[np.bool_]  # no layer is away
    max_late: int

    def best(self) -> int:
        """How many to pause: the fewest SLOs missed beyond the cap, then the most tokens a second."""
        beyond = np.where(np.isinf(self.step_s), np.iinfo(np.int64).max, np.maximum(0, self.num_late - self.max_late))
        tokens_per_s = self.num_stepped / self.step_s / self.gain
        return int(np.lexsort((np.arange(len(beyond)), -tokens_per_s, beyond))[0])

    def first_whole(self) -> int | None:
        """How few paused ones let all others be on the device in all layers; None: no number does."""
        return int(self.is_whole.argmax()) if self.is_whole.any() else None

    def value(self, num_late: int, num_stepped: int, step_s: float) -> tuple[int, float]:
        """What a step comes to; the least is the best: SLOs missed beyond the cap, then seconds of a token."""
        return max(0, num_late - self.max_late), step_s / max(1, num_stepped)

    def at_once(self) -> int:
        """How many to pause before any search: as few as are enough, or the best number that leaves no layer away.

        One distance for all makes each step wait for a slow link; pausing those that do not fit whole does not.
        """
        best = self.best()
        return best if self.is_whole[best] else self.first_that_fits()

    def first_that_fits(self) -> int:
        """How few paused ones are enough."""
        fits = np.isfinite(self.step_s)
        return int(fits.argmax()) if fits.any() else len(fits) - 1


class Prospects:
    """The same requests after any number of steps."""

    def __init__(
        self, requests: Sequence[Decode], order: Sequence[Decode], machine: Machine, config: PlacementConfig
    ) -> None:
        """`order`: those that may be paused, the first one first."""
        self.order, self.machine, self.config = order, machine, config
        ids = {request.request_id for request in order}
        arranged = [*order, *(request for request in requests if request.request_id not in ids)]
        self._tokens = np.array([request.num_tokens for request in arranged], dtype=np.int64)
        notices = np.array([r.will_notice(config.lead_s(machine)) for r in order], dtype=np.int64)
        self._late_paused = np.concatenate([[0], np.cumsum(notices)])
        self._counts = np.arange(len(order) + 1)
        # Requests mostly have one of a few SLOs: for each of these, how many of them are stepped.
        slos = np.array([np.inf if r.slo_s is None else r.slo_s for r in arranged])
        self._slos_s = np.unique(slos[np.isfinite(slos)])[:, None]
        self._stepped_by_slo = np.array([_from(slos == slo_s, self._counts) for slo_s in self._slos_s])
        self._known: dict[int, Prospect] = {}

    def after(self, steps: int) -> Prospect:
        """With so many tokens more each. Cells that must be away are spread evenly, and two layers take turns."""
        if steps not in self._known:
            self._known[steps] = self._after(steps)
        return self._known[steps]

    def _after(self, steps: int) -> Prospect:
        machine, counts = self.machine, self._counts
        tokens = self._tokens + steps
        num_stepped = len(tokens) - counts
        full = _from(tokens // machine.block_size, counts)
        computed_s = machine.step_s + machine.context_s * _from(tokens, counts)
        spare = machine.num_cells - (full + num_stepped) * machine.num_layers
        staged = -spare * machine.num_layers / max(1, machine.num_layers - 2)
        stalls_s = staged / machine.cells_per_s - computed_s * (1.0 - 1.0 / machine.num_layers)
        step_s = computed_s + np.where(spare < 0, machine.staged_s + np.maximum(0.0, stalls_s), 0.0)
        step_s = np.where(full * machine.num_layers + spare < full, np.inf, step_s)
        num_late = self._late_paused
        if len(self._slos_s):
            num_late = num_late + np.where(step_s > self._slos_s, self._stepped_by_slo, 0).sum(axis=0)
        return Prospect(
            step_s=step_s,
            num_late=num_late,
            num_stepped=num_stepped,
            gain=np.where(counts == 0, 1.0 - self.config.min_gain, np.where(spare < 0, 1.0 + self.config.min_gain, 1)),
            is_whole=(spare >= 0) & np.isfinite(step_s),
            max_late=self.config.max_late,
        )


def _from(values: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of `values[start:]`."""
    sums = np.concatenate([np.cumsum(values[::-1])[::-1], [0]])
    return np.asarray(sums[starts])
