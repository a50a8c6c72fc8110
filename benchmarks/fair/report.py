"""The tables of `make bench-fair`."""

import statistics
from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar

from benchmarks.fair.measure import Case, Plan, Run
from benchmarks.fair.moved import Moved
from benchmarks.fair.scoring import Score
from benchmarks.fair.urgency import Waits
from benchmarks.fair.workload import Plan as Work
from benchmarks.harness import MIB
from benchmarks.result_files import facts_line, table

Figures = TypeVar("Figures", Score, Waits)
_TIMES = ("TTFT P50, s", "P99", "TBT P99, s", "P99.9")
HEADING = ("system", "requests", *_TIMES, "attainment", "tokens/s", "kept tokens/s", "paused, s")
WAITS = ("system", "waited while urgent", "P90, s", "P99, s", "longest, s", "of all requests, s")
MOVED = (
    "system",
    "to the host, MiB",
    "to the device, MiB",
    "left without a copy, MiB",
    "a copy, KiB",
    "calls, of steps",
    "waits",
)
BUSY = {
    "calm": "Guests, in the time in which the other work has its flood",
    "flood": "Guests, once the flood has settled",
    "ranks": "Requests of the two most urgent levels",
}


def markdown(plan: Plan, runs: Sequence[Run], date: str) -> str:
    """All tables, with what was run."""
    lines = [f"# Fairness, {date}", "", facts_line(), ""]
    lines += [
        f"One instance with {plan.engine['max_num_seqs']} places, if nothing else is said. A request is well served"
        f" with a TTFT up to {plan.limits.ttft_s:g} s and 99 % of its gaps up to {plan.limits.tbt_s:g} s. Figures are"
        f" medians of {plan.num_rounds} rounds, in which the systems took turns.",
        "",
    ]
    for case in plan.cases:
        lines += _of_case(case, [run for run in runs if run.work == case.name])
    lines += _flooded(plan, runs)
    load, stolen = max(run.load for run in runs), max(run.stolen for run in runs)
    return "\n".join(
        [*lines, f"Greatest load of the machine {load:.1f}; of the cores' time {stolen:.0%} was stolen.", ""]
    )


def _of_case(case: Case, runs: Sequence[Run]) -> list[str]:
    lines, systems = (
        [f"## {case.name}", "", _told(case), ""],
        [s for s in case.systems if s in {r.system for r in runs}],
    )
    if case.name in BUSY:
        rows = [row(system, _median([run.busy for run in runs if run.system == system])) for system in systems]
        lines += [f"{BUSY[case.name]}:", "", *table(HEADING, rows), ""]
    if case.work.pattern in ("random", "markov"):
        rows = [waits_row(system, _median([run.urgent for run in runs if run.system == system])) for system in systems]
        lines += ["What requests waited for their first token while they were of the two most urgent levels:", ""]
        lines += [*table(WAITS, rows), ""]
    lines += _switching(systems, runs)
    everyone = [(system, _median([run.everyone for run in runs if run.system == system])) for system in systems]
    lines += ["All requests:", "", *table(HEADING, [row(*each) for each in everyone]), ""]
    shares = [(system, f"{found.jain:.3f}", str(found.failed)) for system, found in everyone]
    return [*lines, *table(("system", "Jain's index", "failed"), shares), ""]


def _switching(systems: Sequence[str], runs: Sequence[Run]) -> list[str]:
    rows = []
    for system in systems:
        found = [run.moved for run in runs if run.system == system and run.moved is not None]
        if found and any(moved.out_bytes for moved in found):
            rows.append((system, *(statistics.median_low(column) for column in zip(*map(_moved, found), strict=True))))
    shown = [
        (name, *(f"{value:.1f}" for value in values[:-2]), *(f"{v:.1%}" for v in values[-2:])) for name, *values in rows
    ]
    return ["What moved between device and host:", "", *table(MOVED, shown), ""] if shown else []


def _moved(found: Moved) -> tuple[float, ...]:
    times = found.times
    copied = found.out_bytes + found.in_bytes
    sizes = (
        found.out_bytes / MIB,
        found.in_bytes / MIB,
        found.reused_bytes / MIB,
        copied / max(1, times.copies) / 1024,
    )
    return (*sizes, times.manager_s / max(1e-9, times.steps_s), times.waits_s / max(1e-9, times.steps_s))


def _told(case: Case) -> str:
    work = case.work
    text = f"{work.num_tenants} tenants with {work.sessions_per_s:g} sessions/s each over {work.duration_s:g} s."
    if work.flood > 1:
        from_s, until_s = (share * work.duration_s for share in (work.flood_from, work.flood_until))
        text += f" From {from_s:.0f} s to {until_s:.0f} s one of them asks {work.flood:g} times as often."
    text += f" Priorities: {_priorities(work)}."
    if case.engine:
        places, kv_bytes = case.engine["max_num_seqs"], case.engine["kv_cache_memory_bytes"]
        text += f" {places} places, {kv_bytes // MIB} MiB of KV"
        text += f", {case.link_bytes_per_s / 1e9:g} GB/s between device and host." if case.link_bytes_per_s else "."
    return text


def _priorities(work: Work) -> str:
    if work.pattern == "none":
        return "none"
    if work.pattern == "fixed":
        return f"one of {work.levels} for each session, for good"
    return f"{work.pattern}, once in {work.update_s:g} s; vLLM has no call for a change, and knows the first ones alone"


def _median(found: Sequence[Figures]) -> Figures:
    """Of each figure by itself."""
    kind = type(found[0])
    values = {each.name: [getattr(one, each.name) for one in found] for each in fields(kind)}
    return kind(**{name: statistics.median_low(value) for name, value in values.items()})


def _flooded(plan: Plan, runs: Sequence[Run]) -> list[str]:
    """What the flood changes for guests, whose requests are the same in both works."""
    names, rows = ("ttft_p50_s", "ttft_p99_s", "tbt_p99_s"), []
    for system in plan.systems:
        calm, busy = ([r for r in runs if r.system == system and r.work == work] for work in ("calm", "flood"))
        if not calm or not busy:
            continue
        before, after = (_median([run.busy for run in part]) for part in (calm, busy))
        ratios = [getattr(after, name) / max(1e-9, getattr(before, name)) for name in names]
        tokens = [statistics.median(run.guest_tokens for run in part) for part in (busy, calm)]
        rows.append((system, *(f"{ratio:.2f}" for ratio in (*ratios, tokens[0] / max(1, tokens[1])))))
    if not rows:
        return []
    heading = ("system", "TTFT P50", "TTFT P99", "TBT P99", "tokens served in that time")
    return ["## What the flood changes for guests", "", "Flood to calm, 1: nothing.", "", *table(heading, rows), ""]


def row(system: str, found: Score) -> tuple[str, ...]:
    """A system's figures."""
    times = (found.ttft_p50_s, found.ttft_p99_s, found.tbt_p99_s, found.tbt_p999_s)
    shares = (f"{found.attainment:.2f}", f"{found.tokens_per_s:.0f}", f"{found.effective_tokens_per_s:.0f}")
    return (system, str(found.requests), *(f"{value:.3f}" for value in times), *shares, f"{found.paused_s:.1f}")


def waits_row(system: str, found: Waits) -> tuple[str, ...]:
    """What a system's urgent requests waited."""
    times = (found.p90_s, found.p99_s, found.longest_s)
    return (system, str(found.requests), *(f"{value:.3f}" for value in times), f"{found.total_s:.1f}")
