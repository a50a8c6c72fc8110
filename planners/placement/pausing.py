"""Who is paused first, and what pausing so many of them promises, before any placement is searched.

A paused request frees its cells and its share of the link; its client goes on for as long as its deposit lasts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pengserve.planners.placement.values import Decode, Machine, PlacementConfig


def victims(requests: Sequence[Decode], config: PlacementConfig) -> list[Decode]:
    """All that may be paused, in that order: much KV, and much time until the client notices. One is always stepped.

    OrbitFlow section 3.4 adds KV blocks and deposited tokens; here KV is multiplied by slack in seconds, and slack
    shrinks the longer a request has been paused. Past `max_paused_s` it may not be paused at all: none starves.
    """

    def slack_s(request: Decode) -> float:
        slo_s = 1.0 if request.slo_s is None else request.slo_s
        return (request.deposit_tokens + 1) * slo_s / (1.0 + (request.paused_s or 0.0))

    if not config.may_pause:
        return []
    able = [r for r in requests if r.paused_s is None or r.paused_s < config.max_paused_s]
    able.sort(key=lambda r: (-r.num_tokens * slack_s(r), r.request_id))
    return able[: max(0, len(requests) - 1)]


@dataclass(frozen=True, slots=True)
class Prospect:
    """What it comes to by how many are paused, the first victims: arrays `[victims + 1]`."""

    step_s: NDArray[np.float64]  # at least; infinite where not even one layer of all fits
    num_late: NDArray[np.int64]
    num_stepped: NDArray[np.int64]
    gain: NDArray[
        np.float64
    ]  # what tokens a second are divided by: pausing none is preferred, some beside layers away not
    max_late: int

    def best(self) -> int:
        """How many to pause: the fewest SLOs missed beyond the cap, then the most tokens a second."""
        beyond = np.where(np.isinf(self.step_s), np.iinfo(np.int64).max, np.maximum(0, self.num_late - self.max_late))
        tokens_per_s = self.num_stepped / self.step_s / self.gain
        return int(np.lexsort((np.arange(len(beyond)), -tokens_per_s, beyond))[0])

    def first_that_fits(self) -> int:
        """How few paused ones are enough."""
        fits = np.isfinite(self.step_s)
        return int(fits.argmax()) if fits.any() else len(fits) - 1


class Prospects:
    """The same requests after any number of steps."""

    def __init__(
        self, requests: Sequence[Decode], order: Sequence[Decode], machine: Machine, config: PlacementConfig
    ) -> None:
        """`order`: the victims."""
        self._machine, self._config = machine, config
        ids = {request.request_id for request in order}
        arranged = [*order, *(request for request in requests if request.request_id not in ids)]
        self._tokens = np.array([request.num_tokens for request in arranged], dtype=np.int64)
        self._slo_s = np.array([np.inf if r.slo_s is None else r.slo_s for r in arranged])
        notices = np.array([r.slo_s is not None and r.deposit_tokens == 0 for r in order], dtype=np.int64)
        self._late_paused = np.concatenate([[0], np.cumsum(notices)])
        self._counts = np.arange(len(order) + 1)

    def after(self, steps: int) -> Prospect:
        """With so many tokens more each. Cells that must be away are spread evenly, and two layers take turns."""
        machine, counts = self._machine, self._counts
        tokens = self._tokens + steps
        num_stepped = len(tokens) - counts
        full = _from(tokens // machine.block_size, counts)
        computed_s = machine.step_s + machine.context_s * _from(tokens, counts)
        spare = machine.num_cells - (full + num_stepped) * machine.num_layers
        staged = -spare * machine.num_layers / max(1, machine.num_layers - 2)
        stalls_s = staged / machine.cells_per_s - computed_s * (1.0 - 1.0 / machine.num_layers)
        step_s = computed_s + np.where(spare < 0, np.maximum(0.0, stalls_s), 0.0)
        step_s = np.where(full * machine.num_layers + spare < full, np.inf, step_s)
        is_late = step_s[:, None] > self._slo_s
        is_stepped = np.arange(len(tokens)) >= counts[:, None]
        return Prospect(
            step_s=step_s,
            num_late=self._late_paused + (is_late & is_stepped).sum(axis=1),
            num_stepped=num_stepped,
            gain=np.where(
                counts == 0, 1.0 - self._config.min_gain, np.where(spare < 0, 1.0 + self._config.min_gain, 1)
            ),
            max_late=self._config.max_late,
        )


def _from(values: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sums of `values[start:]`."""
    sums = np.concatenate([np.cumsum(values[::-1])[::-1], [0]])
    return np.asarray(sums[starts])
