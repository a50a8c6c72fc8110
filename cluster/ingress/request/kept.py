"""What was kept of the latencies that a request asked for: TTFT, time between tokens, pauses.

Times are those at which tokens come to the ingress or, where a stream is paced, at which they are due. Nothing of this
exists for requests without an SLO.
"""

import math
from array import array
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from pengserve.planners.deposit import Deposit
from pengserve.planners.types.contract import Pacing, Slo

BAD_ENDS = frozenset({"error"})
UNCOUNTED_ENDS = frozenset({"abort"})  # the client left: what it would have seen is not known
MS_DIGITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one sequence got, and whether its SLO was kept. None: the SLO does not speak of it."""

    ttft_s: float | None
    tbt_p99_s: float | None
    tpot_s: float | None  # mean time between tokens
    num_gaps: int  # between tokens
    num_late_gaps: int  # of these, longer than the SLO
    is_ttft_kept: bool | None
    is_tbt_kept: bool | None  # the 99th percentile
    is_tpot_kept: bool | None

    @property
    def is_kept(self) -> bool:
        """Whether TTFT and the 99th percentile of the time between tokens were as asked."""
        return self.is_ttft_kept is not False and self.is_tbt_kept is not False


class KeptSequence:
    """What one sequence got so far."""

    def __init__(self, slo: Slo, arrived_s: float, *, is_paced: bool) -> None:
        self._slo, self._arrived_s = slo, arrived_s
        self.deposit = Deposit(slo.tbt_s or 0.0 if is_paced else 0.0)
        self._gaps = array("d")
        self.paused_s = 0.0
        self.finish = ""  # how it ended; empty while it runs

    @property
    def is_counted(self) -> bool:
        """Whether it ended in a way that says whether its SLO was kept."""
        return bool(self.finish) and self.finish not in UNCOUNTED_ENDS

    def add(self, num_tokens: int, now_s: float) -> None:
        """Tokens came."""
        before_s = self.deposit.due_s if self.deposit.first_due_s is not None else None
        for due_s in self.deposit.add(num_tokens, now_s):
            if before_s is not None:
                self._gaps.append(due_s - before_s)
            before_s = due_s

    def outcome(self) -> Outcome:
        """What it got."""
        slo, gaps, first_s = self._slo, self._gaps, self.deposit.first_due_s
        failed = self.finish in BAD_ENDS
        ttft_s = None if first_s is None else first_s - self._arrived_s
        tbt_s = percentile(gaps, 0.99) if gaps else None
        tpot_s = sum(gaps) / len(gaps) if gaps else None
        return Outcome(
            ttft_s=ttft_s,
            tbt_p99_s=tbt_s,
            tpot_s=tpot_s,
            num_gaps=len(gaps),
            num_late_gaps=0 if slo.tbt_s is None else sum(gap > slo.tbt_s * ROUNDING for gap in gaps),
            is_ttft_kept=_kept(slo.ttft_s, ttft_s, failed or ttft_s is None),
            is_tbt_kept=_kept(slo.tbt_s, tbt_s, failed),
            is_tpot_kept=_kept(slo.tbt_s, tpot_s, failed),
        )


ROUNDING = 1 + 1e-9  # due times are sums: an interval comes out some units of the last place longer


class KeptAnswer:
    """What all sequences of one HTTP request got."""

    def __init__(self, slo: Slo, arrived_s: float) -> None:
        """`arrived_s` is of `time.monotonic`."""
        self._slo, self.arrived_s = slo, arrived_s
        self.is_paced = slo.pacing is Pacing.STEADY
        self.interval_s = slo.tbt_s or 0.0
        self._sequences: list[KeptSequence] = []

    def begin(self) -> KeptSequence:
        """Another sequence of it begins."""
        sequence = KeptSequence(self._slo, self.arrived_s, is_paced=self.is_paced)
        self._sequences.append(sequence)
        return sequence

    @property
    def is_over(self) -> bool:
        """Whether all of it has been computed."""
        return bool(self._sequences) and all(sequence.finish for sequence in self._sequences)

    def usage(self) -> dict[str, Any]:
        """`usage.pengserve` of the answer: the worst of its sequences."""
        outcomes = [sequence.outcome() for sequence in self._sequences]
        return {
            "ttft_ms": _ms(max((o.ttft_s for o in outcomes if o.ttft_s is not None), default=None)),
            "tbt_p99_ms": _ms(max((o.tbt_p99_s for o in outcomes if o.tbt_p99_s is not None), default=None)),
            "paused_ms": _ms(max((sequence.paused_s for sequence in self._sequences), default=0.0)),
            "slo_met": all(o.is_kept for o in outcomes),
        }


current_kept: ContextVar[KeptAnswer | None] = ContextVar("current_kept", default=None)
"""What the HTTP request of this task keeps of its SLO; None: it has none."""


def percentile(values: "array[float]", share: float) -> float:
    """The nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _kept(limit_s: float | None, value_s: float | None, failed: bool) -> bool | None:
    if limit_s is None:
        return None
    return not failed and (value_s is None or value_s <= limit_s * ROUNDING)


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s * 1e3, MS_DIGITS)
