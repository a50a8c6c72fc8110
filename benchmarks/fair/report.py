"""The tables of `make bench-fair`."""

from collections.abc import Sequence

from benchmarks.fair.measure import Plan, Run
from benchmarks.fair.scoring import Score
from benchmarks.fair.workload import Plan as Work
from benchmarks.result_files import facts_line, table

_TIMES = ("TTFT P50, s", "P99", "TBT P99, s", "P99.9")
HEADING = ("system", "requests", *_TIMES, "attainment", "tokens/s", "kept tokens/s", "paused, s")
PARTS = {
    "calm": {"busy": "Guests, in the time in which the other work has its flood", "everyone": "All requests"},
    "flood": {"busy": "Guests, once the flood has settled", "everyone": "All requests"},
    "churn": {"busy": "Requests of the two most urgent levels", "everyone": "All requests"},
}


def markdown(plan: Plan, runs: Sequence[Run], date: str) -> str:
    """All tables, with what was run."""
    lines = [f"# Fairness, {date}", "", facts_line(), ""]
    lines += [
        f"One instance with {plan.engine['max_num_seqs']} places. A request is well served with a TTFT up to"
        f" {plan.limits.ttft_s:g} s and 99 % of its gaps up to {plan.limits.tbt_s:g} s.",
        "",
    ]
    for name, work in plan.works:
        lines += _of_work(name, work, [run for run in runs if run.work == name])
    lines += _flooded(runs)
    return "\n".join(lines)


def _of_work(name: str, work: Work, runs: Sequence[Run]) -> list[str]:
    lines = [f"## {name}", ""]
    lines += [
        f"{work.num_tenants} tenants with {work.sessions_per_s:g} sessions/s each over {work.duration_s:g} s. From"
        f" {work.flood_from * work.duration_s:.0f} s to {work.flood_until * work.duration_s:.0f} s one of them asks"
        f" {work.flood:g} times as often. Priorities: {work.pattern}, once in {work.update_s:g} s.",
        "",
    ]
    for part, what in PARTS[name].items():
        lines += [f"{what}:", "", *table(HEADING, [row(run.system, getattr(run, part)) for run in runs]), ""]
    return [*lines, *table(("system", "Jain's index", "failed"), [_shares(run) for run in runs]), ""]


def _flooded(runs: Sequence[Run]) -> list[str]:
    """What the flood changes for guests, whose requests are the same in both works."""
    found = {(run.system, run.work): run for run in runs}
    rows = []
    for (system, work), busy in found.items():
        calm = found.get((system, "calm"))
        if work != "flood" or calm is None:
            continue
        names = ("ttft_p50_s", "ttft_p99_s", "tbt_p99_s")
        ratios = [getattr(busy.busy, name) / max(1e-9, getattr(calm.busy, name)) for name in names]
        ratios.append(busy.guest_tokens / max(1, calm.guest_tokens))
        rows.append((system, *(f"{ratio:.2f}" for ratio in ratios)))
    heading = ("system", "TTFT P50", "TTFT P99", "TBT P99", "tokens served in that time")
    return ["## What the flood changes for guests", "", "Flood to calm, 1: nothing.", "", *table(heading, rows), ""]


def row(system: str, found: Score) -> tuple[str, ...]:
    """A system's figures."""
    times = (found.ttft_p50_s, found.ttft_p99_s, found.tbt_p99_s, found.tbt_p999_s)
    shares = (f"{found.attainment:.2f}", f"{found.tokens_per_s:.0f}", f"{found.effective_tokens_per_s:.0f}")
    return (system, str(found.requests), *(f"{value:.3f}" for value in times), *shares, f"{found.paused_s:.1f}")


def _shares(run: Run) -> tuple[str, ...]:
    return run.system, f"{run.everyone.jain:.3f}", str(run.everyone.failed)
