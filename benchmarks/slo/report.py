"""Tables of `benchmarks.slo`, and whether its aims were met."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.result_files import facts_line, plan_data, table, write_result
from benchmarks.slo.measure import BURST, DECODES, PENGSERVE, PLAIN, STATIC, SYSTEMS, UNPLACED, Plan, Run

MIB = 1 << 20
_HEADING = [
    "system",
    "mean TTFT, s",
    "TPOT kept, %",
    "TBT kept, %",
    "... as sent with steady pacing, %",
    "P95 TBT, ms",
    "tokens/s",
    "preemptions",
    "parked",
    "staged, MiB",
    "waited for copies, s",
]


def median(runs: Sequence[Run], system: str, scenario: str, name: str) -> float:
    """The median of the rounds."""
    return statistics.median(run.found[scenario][name] for run in runs if run.system == system)


def aims(runs: Sequence[Run]) -> list[tuple[str, float, bool]]:
    """What was aimed at, what was found, and whether that is enough."""
    sent = [100 * median(runs, system, DECODES, "sent_tbt_kept") for system in (PENGSERVE, STATIC)]
    ttft = median(runs, PLAIN, BURST, "ttft_mean_s") / median(runs, PENGSERVE, BURST, "ttft_mean_s")
    kept = 100 * median(runs, PENGSERVE, BURST, "tpot_kept")
    gained = min(
        100 * (median(runs, PENGSERVE, scenario, name) - median(runs, UNPLACED, scenario, name))
        for scenario in (BURST, DECODES)
        for name in ("sent_tbt_kept", "tpot_kept")
    )
    speed, gained_speed = min(_speed(runs, PLAIN)), min(_speed(runs, UNPLACED))
    return [
        (
            "long decodes: TBT kept as sent, points above the static placement, at least 30",
            sent[0] - sent[1],
            sent[0] - sent[1] >= 30,
        ),
        ("burst: mean TTFT, plain vLLM over PengServe, at least 3", ttft, ttft >= 3),
        ("burst: TPOT kept, %, at least 95", kept, kept >= 95),
        ("throughput, PengServe over plain vLLM, at least 0.97", speed, speed >= 0.97),
        ("TBT as sent and TPOT kept, points above the host tier alone, at least -2", gained, gained >= -2),
        ("throughput, PengServe over the host tier alone, at least 0.97", gained_speed, gained_speed >= 0.97),
    ]


def _speed(runs: Sequence[Run], other: str) -> list[float]:
    """Tokens a second over those of another system, by scenario."""
    return [
        median(runs, PENGSERVE, scenario, "tokens_per_s") / median(runs, other, scenario, "tokens_per_s")
        for scenario in (BURST, DECODES)
    ]


def is_exact(runs: Sequence[Run]) -> bool:
    """Whether all systems gave the same answers in each round."""
    rounds = {run.round_index for run in runs}
    return all(
        len({run.found[scenario]["answers"] for run in runs if run.round_index == index}) == 1
        for index in rounds
        for scenario in (BURST, DECODES)
    )


def is_met(runs: Sequence[Run]) -> bool:
    """Whether all aims were, and all answers are equal."""
    return is_exact(runs) and all(met for _, _, met in aims(runs))


def run_line(run: Run) -> str:
    """One run in a line."""
    shown = (
        f"{name}: TTFT {run.found[name]['ttft_mean_s']:.2f} s, TBT kept {run.found[name]['sent_tbt_kept']:.0%}"
        for name in (BURST, DECODES)
    )
    return "; ".join(shown)


def markdown(plan: Plan, runs: Sequence[Run], date: str) -> str:
    """The result as Markdown."""
    slos = "; ".join(
        f"{name} {runs[0].tbt_s[name] * 1e3:.1f} ms a token, {scale:g} steps of {plan.fitting} requests that fit"
        for name, scale in plan.slo_scales.items()
    )
    changes = statistics.median(run.found["changes"] for run in runs if run.system == PENGSERVE)
    lines = [
        "# SLOs kept on real engines",
        "",
        f"`python -m benchmarks.slo` on {date}, {plan.rounds} round(s) in turn, a process for each engine;"
        f" {plan.model.name}, float32, one thread. The device holds {plan.device_blocks} blocks of 32 tokens, the host"
        f" {plan.host_blocks}; copies take as long as over a link of {plan.link_bytes_per_s / 1e9:g} GB/s."
        f" SLOs: {slos}. Without HTTP; medians of the rounds. Static keeps every second layer of each request on the"
        " host, from its first token on; the host tier alone is PengServe without `memory.place_by_slo`.",
        "",
        facts_line(),
        "",
        *table(["aim", "found", "met"], [[n, f"{v:.2f}", "yes" if m else "no"] for n, v, m in aims(runs)], 1),
        "",
        f"Answers are {'equal' if is_exact(runs) else 'NOT EQUAL'} in all systems. PengServe changed placements"
        f" {changes:g} times in a round.",
        "",
    ]
    for scenario, size in plan.scenarios.items():
        what = f"{size['streams']} streams of {size['stream_prompt']} and {size['stream_output']} tokens"
        if size["prompts"]:
            what += f", then {size['prompts']} prompts of {size['prompt']} with {size['output']} more"
        rows = [_row(runs, system, scenario) for system in SYSTEMS]
        lines += [f"## {scenario.capitalize()}: {what}", "", *table(_HEADING, rows, 1), ""]
    return "\n".join(lines) + "\n"


def _row(runs: Sequence[Run], system: str, scenario: str) -> list[str]:
    def of(name: str) -> float:
        return median(runs, system, scenario, name)

    return [
        system,
        f"{of('ttft_mean_s'):.3f}",
        f"{100 * of('tpot_kept'):.0f}",
        f"{100 * of('tbt_kept'):.1f}",
        f"{100 * of('sent_tbt_kept'):.1f}",
        f"{1e3 * of('tbt_p95_s'):.1f}",
        f"{of('tokens_per_s'):.0f}",
        f"{of('preemptions'):.0f}",
        f"{of('parked'):.0f}",
        f"{of('staged_bytes') / MIB:.0f}",
        f"{of('copy_wait_s'):.2f}",
    ]


def write(folder: Path, plan: Plan, runs: Sequence[Run], date: str) -> tuple[Path, Path]:
    """Writes the result's files; their paths."""
    record = {
        "plan": plan_data(plan),
        "runs": [
            {"system": run.system, "round": run.round_index, "tbt_s": run.tbt_s, "found": run.found} for run in runs
        ],
    }
    return write_result(folder, "slo", date, record, markdown(plan, runs, date))
