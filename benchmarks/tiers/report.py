"""Tables of `benchmarks.tiers`, and whether its aims were met."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result_files import facts_line, plan_data, table, write_result
from benchmarks.tiers.measure import OFFLOAD, PLAIN, TIERS, Plan, Run

SCENARIOS = {
    "unused": "a load that fits the device, before all others",
    "burst": "long prompts at once, of three times the device's KV",
    "churn": "answers that grow beyond the device's KV",
    "first turns": "first turns of conversations",
    "second turns": "their second turns, after their KV was pushed out",
}
MIB = 1 << 20


def median(runs: Sequence[Run], system: str, scenario: str, name: str) -> float:
    """The median of the rounds."""
    return statistics.median(r.found["scenarios"][scenario][name] for r in runs if r.system == system and r.found)


def ratio(runs: Sequence[Run], scenario: str, name: str) -> float:
    """Plain vLLM's figure over that of tiers in the same round; the median of the rounds."""
    by_round: dict[int, dict[str, float]] = {}
    for run in runs:
        if run.found:
            by_round.setdefault(run.round_index, {})[run.system] = run.found["scenarios"][scenario][name]
    return statistics.median(found[PLAIN] / found[TIERS] for found in by_round.values() if len(found) > 1)


def aims(runs: Sequence[Run]) -> list[tuple[str, float, bool]]:
    """What was aimed at, what was found, and whether that is enough."""
    behind = [median(runs, TIERS, "second turns", f"{name}_bytes") for name in ("evicted", "behind")]
    reused = median(runs, TIERS, "second turns", "reused_bytes")
    burst, second = ratio(runs, "burst", "ttft_mean_s"), ratio(runs, "second turns", "ttft_mean_s")
    throughput = 1 / ratio(runs, "burst", "tokens_per_s")
    preempted = median(runs, TIERS, "churn", "preemptions")
    written = sum(behind) / max(1.0, sum(behind) + reused)
    unused = 1 / ratio(runs, "unused", "step_s")
    return [
        ("burst: mean TTFT, plain vLLM over tiers, at least 3", burst, burst >= 3),
        ("burst: throughput, tiers over plain vLLM, at least 0.95", throughput, throughput >= 0.95),
        ("churn: preemptions by recompute with tiers, none", preempted, preempted == 0),
        ("second turns: mean TTFT, plain vLLM over tiers, at least 3", second, second >= 3),
        ("second turns: share of what left the device that was copied, at most 0.5", written, written <= 0.5),
        ("unused: median step time, tiers over plain vLLM, at most 1.02", unused, unused <= 1.02),
    ]


def is_met(runs: Sequence[Run]) -> bool:
    """Whether all aims were."""
    return all(met for _, _, met in aims(runs))


def run_line(run: Run) -> str:
    """One run in a line."""
    if run.failure:
        return f"does not run here: {run.failure}"
    found: Mapping[str, Any] = run.found["scenarios"]
    return ", ".join(f"{name} {value['ttft_mean_s']:.2f} s to the first token" for name, value in found.items())


def markdown(plan: Plan, runs: Sequence[Run], date: str) -> str:
    """The result as Markdown."""
    lines = [
        "# KV on device and host against plain vLLM",
        "",
        f"`python -m benchmarks.tiers` on {date}, {plan.rounds} round(s) in turn, a process for each engine;"
        f" {plan.model.name}, float32, one thread. The device holds {plan.device_blocks} blocks of 32 tokens, the host"
        f" {plan.host_blocks}. All requests of a scenario come at once, without HTTP. Medians of the rounds. Processor"
        " seconds are those of the engine's process, its copies among them: other work on the machine does not count.",
        "",
        facts_line(),
        "",
        *table(["aim", "found", "met"], [[n, f"{v:.2f}", "yes" if m else "no"] for n, v, m in aims(runs)], 1),
        "",
    ]
    systems = [system for system in (PLAIN, OFFLOAD, TIERS) if any(r.system == system and r.found for r in runs)]
    for scenario, what in SCENARIOS.items():
        rows = [_row(runs, system, scenario) for system in systems]
        lines += [f"## {scenario.capitalize()}: {what}", "", *table(_HEADING, rows, 1), ""]
    lines += [f"{run.system} does not run here: {run.failure}" for run in runs if run.failure]
    return "\n".join(lines) + "\n"


_HEADING = [
    "engine",
    "mean TTFT, s",
    "P99 TTFT, s",
    "tokens/s",
    "mean TTFT, processor s",
    "tokens/processor s",
    "median step, ms",
    "mean step, processor ms",
    "steps",
    "preemptions",
    "parked",
    "prefix hits, tokens",
    "... on the host",
    "to device, MiB",
    "to host, MiB",
    "left without a copy, MiB",
    "waited, s",
]


def _row(runs: Sequence[Run], system: str, scenario: str) -> list[str]:
    def of(name: str) -> float:
        return median(runs, system, scenario, name)

    return [
        system,
        f"{of('ttft_mean_s'):.3f}",
        f"{of('ttft_p99_s'):.3f}",
        f"{of('tokens_per_s'):.0f}",
        f"{of('ttft_cpu_s'):.3f}",
        f"{of('tokens_per_cpu_s'):.0f}",
        f"{1e3 * of('step_s'):.2f}",
        f"{1e3 * of('step_cpu_s'):.2f}",
        f"{of('num_steps'):.0f}",
        f"{of('preemptions'):.0f}",
        f"{of('parked'):.0f}",
        f"{of('prefix_hits'):.0f}",
        f"{of('host_hits'):.0f}",
        f"{(of('staged_bytes') + of('brought_bytes')) / MIB:.1f}",
        f"{(of('evicted_bytes') + of('behind_bytes')) / MIB:.1f}",
        f"{of('reused_bytes') / MIB:.1f}",
        f"{of('copy_wait_s'):.2f}",
    ]


def write(folder: Path, plan: Plan, runs: Sequence[Run], date: str) -> tuple[Path, Path]:
    """Writes the result's files; their paths."""
    record = {"plan": plan_data(plan), "runs": [_run_data(run) for run in runs]}
    return write_result(folder, "tiers", date, record, markdown(plan, runs, date))


def _run_data(run: Run) -> dict[str, Any]:
    return {"system": run.system, "round": run.round_index, "failure": run.failure, "found": run.found}
