"""Ratios to the best static layout, and the law: PengServe never loses by what it may do. Pure."""

from dataclasses import dataclass

from benchmarks.regret.cases import OURS, STATIC_LABELS
from benchmarks.regret.run import Measured, Row

LEAST_GOODPUT = 0.97  # of the best static layout's
MOST_TTFT = 1.1  # times the best static layout's P99 TTFT, where that layout is stable
STABLE = 0.9  # share within the limits from which a layout counts as stable
WON = 1.05  # of the best static layout's goodput: the aim for a third of the cases in which that is possible
FLOOR = 0.02  # share of all requests; where fewer are in time, so many count as such: what is below is chance
AS_GOOD = 0.995  # goodputs of layouts that are closer to each other count as equal


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """A policy over the best static layout: goodput is better above 1, latencies below."""

    goodput: float
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float


def best_static(measured: Measured) -> Row:
    """The static layout with the highest goodput; of those as good, the one with the lowest P99 TTFT."""
    rows = [row for row in measured.rows if row.label in STATIC_LABELS]
    most = max(row.good for row in rows)
    return min((row for row in rows if row.good >= AS_GOOD * most), key=lambda row: row.ttft_p99_s)


def ratios(row: Row, best: Row) -> Ratios:
    """`row` over `best`. Where both are zero a ratio is 1."""
    floor = FLOOR * best.good / best.attained if best.attained else 1.0
    return Ratios(
        goodput=max(floor, row.good) / max(floor, best.good),
        ttft_p50=_over(row.ttft_p50_s, best.ttft_p50_s),
        ttft_p99=_over(row.ttft_p99_s, best.ttft_p99_s),
        tpot_p50=_over(row.tpot_p50_s, best.tpot_p50_s),
        tpot_p99=_over(row.tpot_p99_s, best.tpot_p99_s),
    )


def broken(measured: Measured, label: str = OURS) -> tuple[str, ...]:
    """What a policy does not keep of the law in this case: "goodput", "ttft", or both; empty where it keeps it."""
    row, best = measured.row(label), best_static(measured)
    if row is None:
        return ()
    found = ratios(row, best)
    goodput = ("goodput",) if found.goodput < LEAST_GOODPUT else ()
    is_slow = best.attained >= STABLE and found.ttft_p99 > MOST_TTFT
    return (*goodput, *(("ttft",) if is_slow else ()))


def has_room(measured: Measured) -> bool:
    """Whether goodput could be `WON` times the best static layout's: it cannot where that serves nearly all in time."""
    return WON * best_static(measured).attained <= 1.0


def _over(value: float, base: float) -> float:
    if base:
        return value / base
    return 1.0 if not value else float("inf")
