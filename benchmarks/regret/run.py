"""One case: its simulations, and what is measured of each."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.regret.cases import VARIANTS, Case, Limits, Variant, arrivals_of, config_of, limits_of, why_not
from pengserve.planners.late_prompts import LATE
from pengserve.simulator.reports.figures import figures_of
from pengserve.simulator.reports.slo import is_early, is_fluent
from pengserve.simulator.requests import Arrival, Outcome
from pengserve.simulator.result import Result
from pengserve.simulator.run import simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one policy came to. Percentiles are over all requests: one without a first token waited until the end."""

    label: str
    good: int  # requests within both limits
    attained: float  # their share
    goodput_per_s: float  # per second in which requests arrived: the same divisor for all policies
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    end_s: float  # the last request had ended
    refused: int
    preemptions: int
    switches: int
    merged: float  # share of instance-seconds in tensor-parallel groups
    dropped: float  # ... in pipelines
    found: float  # share of all prompt tokens that was in prefix caches
    cpu_s: float  # of the simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A case and its rows."""

    case: Case
    requests: int
    span_s: float  # from the first arrival to the last
    limits: Limits
    rows: tuple[Row, ...]
    left_out: tuple[tuple[str, str], ...]  # policies without a layout for this model, and why

    def row(self, label: str) -> Row | None:
        """That of a policy; None where it was left out."""
        return next((row for row in self.rows if row.label == label), None)


def measure(
    case: Case, folder: Path, variants: Sequence[Variant] = VARIANTS, on_row: Callable[[], None] = lambda: None
) -> Measured:
    """Simulates a case under all policies, one after the other.

    Raises:
        ConfigError: its trace cannot be read, or was not calibrated.
    """
    arrivals, limits = arrivals_of(case, folder), limits_of(case.machine, case.trace)
    span_s = max(1.0, arrivals[-1].at_s - arrivals[0].at_s)
    rows, left_out = [], []
    unused = list[tuple[Variant, Row]]()  # runs that made no use of what requests told
    for variant in variants:
        config = config_of(case, variant, arrivals)
        if why := why_not(config):
            left_out.append((variant.label, why))
            continue
        untold = [row for told, row in unused if replace(told, label=variant.label, tells_slo=False) == variant]
        if untold:
            rows.append(replace(untold[0], label=variant.label, cpu_s=0.0))
        else:
            started_s = time.process_time()
            result = simulate(config, promised(arrivals, limits.ttft_s) if variant.tells_slo else arrivals)
            rows.append(row_of(variant.label, result, limits, span_s, time.process_time() - started_s))
            if variant.tells_slo and not _is_late(result, limits):
                unused.append((variant, rows[-1]))
        on_row()
    return Measured(
        case=case,
        requests=len(arrivals),
        span_s=span_s,
        limits=limits,
        rows=tuple(rows),
        left_out=tuple(left_out),
    )


def promised(arrivals: Sequence[Arrival], ttft_s: float) -> tuple[Arrival, ...]:
    """The same requests, which say within what time they want their first tokens."""
    return tuple(replace(arrival, ttft_s=ttft_s) for arrival in arrivals)


def row_of(label: str, result: Result, limits: Limits, span_s: float, cpu_s: float) -> Row:
    """The figures of one run."""
    figures, outcomes = figures_of(result), result.outcomes
    good = sum(is_early(outcome, limits.ttft_s) and is_fluent(outcome, limits.tpot_s) for outcome in outcomes)
    ttfts = [_ttft_s(outcome, result.end_s) for outcome in outcomes]
    tpots = [outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None] or [0.0]
    shares = dict(figures.shape_shares)
    return Row(
        label=label,
        good=good,
        attained=good / len(outcomes),
        goodput_per_s=good / span_s,
        ttft_p50_s=float(np.percentile(ttfts, 50)),
        ttft_p99_s=float(np.percentile(ttfts, 99)),
        tpot_p50_s=float(np.percentile(tpots, 50)),
        tpot_p99_s=float(np.percentile(tpots, 99)),
        end_s=result.end_s,
        refused=figures.num_refused,
        preemptions=figures.num_preemptions,
        switches=figures.num_switches,
        merged=sum(share for shape, share in shares.items() if shape.startswith("tp")),
        dropped=sum(share for shape, share in shares.items() if shape.startswith("pp")),
        found=sum(o.cached_tokens for o in outcomes) / sum(o.prompt_tokens for o in outcomes),
        cpu_s=cpu_s,
    )


def _is_late(result: Result, limits: Limits) -> bool:
    """Whether what requests have told may have been of use: until one is very late, none is served otherwise for it."""
    return any(_ttft_s(outcome, result.end_s) >= LATE * limits.ttft_s for outcome in result.outcomes)


def _ttft_s(outcome: Outcome, end_s: float) -> float:
    return outcome.ttft_s if outcome.ttft_s is not None else max(0.0, end_s - outcome.arrived_s)
