"""SLO attainment and goodput over scale factors, as KunServe section 5.2 draws them. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pengserve.simulator.requests import Outcome
from pengserve.simulator.result import Gaps

SCALES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloBase:
    """Limits at scale 1, which the others multiply. None: there is no such limit."""

    ttft_s: float | None
    tpot_s: float | None
    tbt_s: float | None = None  # between two tokens
    source: str = ""  # where the limits come from, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class SloPoint:
    """What was within the limits at one scale."""

    scale: float
    attained: float  # share of all requests that arrived; what was refused or never ended is outside
    ttft_attained: float  # the same, by TTFT alone
    tpot_attained: float  # the same, by TPOT alone
    goodput_per_s: float  # requests within the limits per second of the run
    tbt_attained: float | None = None  # share of gaps between tokens that were within; None: no limit, or no gap


def attainment(
    outcomes: Sequence[Outcome],
    base: SloBase,
    end_s: float,
    scales: Sequence[float] = SCALES,
    gaps: Gaps | None = None,
) -> tuple[SloPoint, ...]:
    """Shares of all requests that met `scale * base`, for each of `scales`. Empty where nothing arrived."""
    if not outcomes:
        return ()
    found = []
    for scale in scales:
        ttft_s, tpot_s = (None if limit is None else scale * limit for limit in (base.ttft_s, base.tpot_s))
        by_ttft = [is_early(outcome, ttft_s) for outcome in outcomes]
        by_tpot = [is_fluent(outcome, tpot_s) for outcome in outcomes]
        num_good = sum(early and fluent for early, fluent in zip(by_ttft, by_tpot, strict=True))
        found.append(
            SloPoint(
                scale=scale,
                attained=num_good / len(outcomes),
                ttft_attained=sum(by_ttft) / len(outcomes),
                tpot_attained=sum(by_tpot) / len(outcomes),
                goodput_per_s=num_good / end_s if end_s > 0 else 0.0,
                tbt_attained=None if gaps is None or base.tbt_s is None else gaps_within(gaps, scale * base.tbt_s),
            )
        )
    return tuple(found)


def gaps_within(gaps: Gaps, limit_s: float) -> float | None:
    """Share of gaps that are not above `limit_s`, to about the width of the bin that it lies in; None: no gap."""
    total = sum(gaps.counts)
    if not total:
        return None
    within = 0.0
    for low, high, count in zip(gaps.edges_s, gaps.edges_s[1:], gaps.counts, strict=False):
        if limit_s >= high:
            within += count
        elif limit_s > low > 0:
            within += count * math.log(limit_s / low) / math.log(high / low)
    return within / total


def is_early(outcome: Outcome, limit_s: float | None) -> bool:
    """Whether the first token came, within `limit_s` where there is one."""
    return outcome.ttft_s is not None and (limit_s is None or outcome.ttft_s <= limit_s)


def is_fluent(outcome: Outcome, limit_s: float | None) -> bool:
    """Whether the request ended, and its tokens came within `limit_s` each. A single token has no TPOT to miss."""
    if outcome.end_s is None:
        return False
    return limit_s is None or outcome.tpot_s is None or outcome.tpot_s <= limit_s
