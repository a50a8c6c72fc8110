"""What is predicted of a change: for people, for the log, and to be held against what becomes of it."""

from dataclasses import dataclass

import numpy as np

from pengserve.planners.judge.changes import Change
from pengserve.planners.judge.fluid import Fate
from pengserve.planners.judge.rows import Rows, RowSets
from pengserve.planners.types.layout import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What becomes of some groups within the horizon, at the expected rate of requests."""

    cost_s: float = 0.0  # request-seconds, see `judge.fluid`
    ttft_s: float = 0.0  # mean
    tpot_s: float = 0.0  # mean
    queue: float = 0.0  # requests that wait at the end
    finished: float = 0.0  # requests
    recomputed_tokens: float = 0.0
    missed: float = 0.0  # requests beyond their limits
    ttft_p99_s: float = 0.0  # but for queues that stand

    @property
    def slowest_s(self) -> float:
        """Seconds to the first token of the slowest requests, standing queues included."""
        return max(self.ttft_s, self.ttft_p99_s)

    @classmethod
    def of(cls, fate: Fate, sets: RowSets) -> "list[Prediction]":
        """Of each of these sets of rows of the fluid model."""
        # What can be added up over rows, `[figure, row]`.
        begun = fate.finished + fate.running + 1e-9
        means = fate.ttft_s * begun, fate.tpot_s * begun, fate.tail_s * begun
        totals = fate.cost_s, fate.queue, fate.finished, fate.recomputed_tokens, fate.missed
        return [cls._of_sums(*sums) for sums in sets.sum(np.stack([begun, *means, *totals])).T.tolist()]

    @classmethod
    def _of_sums(
        cls,
        begun: float,
        ttft_s: float,
        tpot_s: float,
        tail_s: float,
        cost_s: float,
        queue: float,
        finished: float,
        recomputed_tokens: float,
        missed: float,
    ) -> "Prediction":
        return cls(
            cost_s=cost_s,
            ttft_s=ttft_s / begun,
            tpot_s=tpot_s / begun,
            queue=queue,
            finished=finished,
            recomputed_tokens=recomputed_tokens,
            missed=missed,
            ttft_p99_s=tail_s / begun,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A change, and what it does."""

    change: Change
    keep: Prediction  # of its groups as they are
    then: Prediction  # ... and as they would be
    price_s: float  # request-seconds that the switches there and back cost
    gain_s: float  # request-seconds saved, less the price: at expected load, less half of the regret at another load
    kept_s: float  # request-seconds without the change, at the load that the gain is of
    num_looks: int = 1  # that gain and kept seconds are the mean of, see `judge.standing`

    @property
    def why(self) -> str:
        """One sentence for people."""
        over = "" if self.num_looks == 1 else f" (mean of {self.num_looks} looks)"
        return _told(self.change.why, self, self.kept_s, over)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedMove:
    """Requests that could go from one group to another while both serve, and what that does."""

    source: Group
    target: Group
    num_requests: float
    keep: Prediction  # of both as they are
    then: Prediction  # ... and with the move
    rows: Rows  # what it leads to
    price_s: float  # request-seconds that they stall
    gain_s: float  # request-seconds saved, less the price

    @property
    def why(self) -> str:
        """One sentence for people."""
        what = f"about {self.num_requests:.0f} requests go from {self.source} to {self.target}"
        return _told(what, self, self.keep.cost_s)


def _told(what: str, priced: Priced | PricedMove, kept_s: float, over: str = "") -> str:
    keep, then = priced.keep, priced.then
    return (
        f"{what}: {priced.gain_s:.1f} request-seconds saved of {kept_s:.1f}{over},"
        f" TTFT {keep.ttft_s:.2f} -> {then.ttft_s:.2f} s, P99 {keep.ttft_p99_s:.2f} -> {then.ttft_p99_s:.2f} s,"
        f" TPOT {keep.tpot_s * 1e3:.1f} -> {then.tpot_s * 1e3:.1f} ms"
    )
