"""Figures of one run that the papers print; all in seconds, shares or counts."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from benchmarks.papers.scenarios import Run
from pengserve.simulator.reports.figures import Figures, figures_of, gap_at
from pengserve.simulator.reports.slo import is_early, is_fluent
from pengserve.simulator.requests import Outcome
from pengserve.simulator.result import Moment
from pengserve.simulator.traces.generators.flying import Flying

Keep = Callable[[Outcome], bool]


def measure(run: Run) -> dict[str, float]:
    """All figures of a run by name."""
    figures, moments = figures_of(run.result), run.result.moments
    last_s = max(outcome.arrived_s for outcome in run.result.outcomes)
    room = moments[0].held_tokens
    served = [moment for moment in moments if moment.at_s <= last_s]
    found = {
        **_latencies(run.result.outcomes),
        "tokens_per_s": figures.output_tokens_per_s,
        "peak_tokens_per_s": _peak_rate(moments),
        "demand_mean": float(np.mean([moment.demand_tokens for moment in served])) / room,
        "demand_peak": max(moment.demand_tokens for moment in moments) / room,
        "room_peak": max(moment.held_tokens for moment in moments) / room,
        "full_at_s": next((m.at_s for m in moments if m.demand_tokens > m.held_tokens), float("nan")),
        "drop_periods": float(len(figures.drops)),
        "dropped_s": sum(stop - start for start, stop in figures.drops),
        "preemptions": float(figures.num_preemptions),
        "switches": float(figures.num_switches),
        "finished": float(figures.num_finished),
        "requests": float(figures.num_requests),
        "end_s": run.result.end_s,
        "simulated_in_cpu_s": run.cpu_s,
    }
    found |= _gaps(run) | _kept(run) | {f"copied_{name}": value for name, value in run.result.copied}
    return found | _phases(run) | _priorities(run.result.outcomes)


def _gaps(run: Run) -> dict[str, float]:
    """Of gaps between tokens, and of whole requests."""
    ended = [outcome for outcome in run.result.outcomes if outcome.end_s is not None]
    found = {"requests_per_s": len(ended) / run.result.end_s, "requests_per_min": 60.0 * len(ended) / run.result.end_s}
    if ended:
        found["e2e_mean_s"] = float(np.mean([o.end_s - o.arrived_s for o in ended if o.end_s is not None]))
    for percent in (95, 99, 99.9):
        at_s = gap_at(run.result.gaps, percent / 100.0)
        if at_s is not None:
            found[f"tbt_p{percent:g}_s"] = at_s
    return found


def _kept(run: Run) -> dict[str, float]:
    """Shares of SLOs kept, by the limits of the scenario. A deposit counts where the policy has one."""
    slo, outcomes = run.config.slo, run.result.outcomes
    found = {}
    if slo.tbt_s is not None:
        figures = figures_of(run.result)
        has_deposit = run.config.policy.name == "orbitflow" and is_whole_orbitflow(run.config.policy.options)
        kept = figures.tbt_attained_paced if has_deposit else figures.tbt_attained
        found["tbt_kept"] = float("nan") if kept is None else kept
        found["tpot_kept"] = float(np.mean([is_fluent(outcome, slo.tbt_s) for outcome in outcomes]))
    if slo.ttft_s is not None and slo.tpot_s is not None:
        kept_both = [is_early(outcome, slo.ttft_s) and is_fluent(outcome, slo.tpot_s) for outcome in outcomes]
        found["slo_kept"] = float(np.mean(kept_both))
    return found


def is_whole_orbitflow(options: Mapping[str, object]) -> bool:
    """Whether clients are sent what came early one token an SLO interval: with all of OrbitFlow's parts."""
    return all(options.get(name, True) for name in ("per_request", "pauses", "deposit"))


def _latencies(outcomes: Sequence[Outcome], prefix: str = "") -> dict[str, float]:
    ttfts = [outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None]
    tpots = [outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None]
    found = {}
    for name, values in (("ttft", ttfts), ("tpot", tpots)):
        if values:
            found[f"{prefix}{name}_mean_s"] = float(np.mean(values))
            for percent in (50, 90, 95, 99, 99.9):
                found[f"{prefix}{name}_p{percent:g}_s"] = float(np.percentile(values, percent))
    return found


def _peak_rate(moments: Sequence[Moment]) -> float:
    """The most tokens of a second between two samples."""
    pairs = pairwise(moments)
    return max(
        (now.generated_tokens / (now.at_s - then.at_s) for then, now in pairs if now.at_s > then.at_s), default=0
    )


def _phases(run: Run) -> dict[str, float]:
    """Latencies of bursts, and of lows from their middle on, when what was left of a burst has been served."""
    trace = run.config.trace
    if trace is None or not isinstance(trace.settings, Flying):
        return {}
    low_s, period_s = trace.settings.low_s, trace.settings.low_s + trace.settings.burst_s

    def of(keep: Keep) -> list[Outcome]:
        return [outcome for outcome in run.result.outcomes if keep(outcome)]

    low = of(lambda outcome: low_s / 2 <= outcome.arrived_s % period_s < low_s)
    burst = of(lambda outcome: outcome.arrived_s % period_s >= low_s)
    return _latencies(low, "low_") | _latencies(burst, "burst_")


def _priorities(outcomes: Sequence[Outcome]) -> dict[str, float]:
    urgent = [outcome for outcome in outcomes if outcome.priority < 0]
    return _latencies(urgent, "urgent_") if urgent else {}


def describe(figures: Figures) -> str:
    """When parameters were dropped."""
    return ", ".join(f"{start:.0f}-{stop:.0f} s" for start, stop in figures.drops) or "never"
