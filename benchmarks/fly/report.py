"""Medians over rounds, PengServe's ratios to static dp and static tp, and how the aims were met."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.figures import ratio
from benchmarks.fly.load import Plan
from benchmarks.fly.measure import Run
from benchmarks.result_files import facts_line, plan_data, table, write_result

SUBJECT = "auto"
NAMES = {"dp": "static dp", "tp": "static tp", "auto": "PengServe"}
Get = Callable[[Run], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of a table."""

    load: str
    title: str
    get: Get
    factor: float = 1e3
    shape: str = "{:.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """What PengServe's ratio to another system should be."""

    figure: Figure
    other: str
    limit: float
    is_most: bool  # else the least


def _of(load: str, name: str, title: str, attribute: str) -> Figure:
    return Figure(load=load, title=title, get=lambda run: float(getattr(run.classes[name], attribute)))


BURST_TTFT = _of("bursty", "burst", "TTFT in the burst, P90 (ms)", "ttft_p90_s")
LOW_TTFT = _of("bursty", "low", "TTFT at low load, median (ms)", "ttft_p50_s")
LOW_TPOT = _of("bursty", "low", "TPOT at low load, median (ms)", "tpot_p50_s")
PEAK = Figure(load="bursty", title="peak tokens/s", get=lambda run: run.peak_tokens_per_s, factor=1.0, shape="{:.0f}")
FIGURES = (
    BURST_TTFT,
    _of("bursty", "burst", "TTFT in the burst, median (ms)", "ttft_p50_s"),
    _of("bursty", "burst", "TPOT in the burst, median (ms)", "tpot_p50_s"),
    LOW_TTFT,
    LOW_TPOT,
    _of("bursty", "low", "TTFT at low load, P90 (ms)", "ttft_p90_s"),
    _of("bursty", "after", "TTFT right after the burst, P90 (ms)", "ttft_p90_s"),
    _of("bursty", "after", "TPOT right after the burst, median (ms)", "tpot_p50_s"),
    PEAK,
    Figure(load="bursty", title="switches", get=lambda run: run.num_switches, factor=1.0, shape="{:.0f}"),
    _of("mix", "urgent", "mean TPOT, priority (ms)", "tpot_mean_s"),
    _of("mix", "rest", "mean TPOT, best effort (ms)", "tpot_mean_s"),
    _of("mix", "all", "mean TPOT, all (ms)", "tpot_mean_s"),
    _of("mix", "urgent", "mean TTFT, priority (ms)", "ttft_mean_s"),
    _of("mix", "rest", "mean TTFT, best effort (ms)", "ttft_mean_s"),
    _of("mix", "all", "mean TTFT, all (ms)", "ttft_mean_s"),
    Figure(load="mix", title="peak tokens/s", get=lambda run: run.peak_tokens_per_s, factor=1.0, shape="{:.0f}"),
    Figure(load="mix", title="switches", get=lambda run: run.num_switches, factor=1.0, shape="{:.0f}"),
)
AIMS = (
    Aim(figure=BURST_TTFT, other="dp", limit=1.05, is_most=True),
    Aim(figure=LOW_TTFT, other="tp", limit=1.10, is_most=True),
    Aim(figure=LOW_TPOT, other="tp", limit=1.10, is_most=True),
    Aim(figure=PEAK, other="dp", limit=0.95, is_most=False),
)
PAPER = {
    "mean TPOT, priority (ms)": (22, 32, 24),
    "mean TPOT, all (ms)": (22, 32, 28),
    "mean TTFT, priority (ms)": (63, 166, 74),
    "mean TTFT, all (ms)": (2130, 166, 142),
    "peak tokens/s": (2530, 3164, 3040),
}
"""Table 1 of Flying Serving, Llama-70B on 8 H200: static tp, static dp, theirs."""


def values(runs: Iterable[Run], figure: Figure, system: str) -> dict[int, float]:
    """Round -> the figure."""
    return {r.round_index: figure.get(r) for r in runs if r.load == figure.load and r.system == system}


def ratios(runs: Sequence[Run], figure: Figure, other: str) -> list[float]:
    """PengServe's figure over the other system's, one for each round that both took part in: the load is the same."""
    ours, theirs = values(runs, figure, SUBJECT), values(runs, figure, other)
    return [ratio(ours[index], theirs[index]) for index in sorted(ours.keys() & theirs.keys())]


def rows(runs: Sequence[Run], load: str) -> list[list[str]]:
    """Rows of one load's table: medians over the rounds, median ratios, and the paper's ratios where it has them."""
    found = []
    for figure in FIGURES:
        if figure.load != load:
            continue
        cells = [_cell(figure, values(runs, figure, system)) for system in ("tp", "dp", SUBJECT)]
        cells += [_ratio_cell(ratios(runs, figure, other)) for other in ("tp", "dp")]
        if load == "mix":
            tp, dp, theirs = PAPER.get(figure.title, (0, 0, 0))
            cells += [f"x{theirs / tp:.2f}", f"x{theirs / dp:.2f}"] if theirs else ["", ""]
        found.append([figure.title, *cells])
    return found


def heading(load: str) -> list[str]:
    """Headings of one load's table."""
    paper = ["paper's over tp", "paper's over dp"] if load == "mix" else []
    names = [NAMES[system] for system in ("tp", "dp", SUBJECT)]
    return ["", *names, f"{NAMES[SUBJECT]} over static tp", f"{NAMES[SUBJECT]} over static dp", *paper]


def aims(runs: Sequence[Run]) -> list[str]:
    """One sentence for each aim."""
    sentences = []
    for aim in AIMS:
        found = ratios(runs, aim.figure, aim.other)
        if not found:
            continue
        middle = statistics.median(found)
        is_met = middle <= aim.limit if aim.is_most else middle >= aim.limit
        sentences.append(
            f"{aim.figure.title}: x{middle:.2f} of {NAMES[aim.other]} (rounds {min(found):.2f} to {max(found):.2f}); "
            f"the aim is at {'most' if aim.is_most else 'least'} x{aim.limit:.2f}: {'met' if is_met else 'missed'}"
        )
    return sentences


def failures(runs: Iterable[Run]) -> list[str]:
    """One sentence for every run in which something failed."""
    return [
        f"{NAMES[r.system]}, {r.load}, round {r.round_index + 1}: {r.failed} requests and {r.failed_switches} switches "
        "failed" + (f" ({r.first_error})" if r.first_error else "")
        for r in runs
        if r.failed or r.failed_switches
    ]


def markdown(plan: Plan, capacity: Mapping[str, float], runs: Sequence[Run], date: str) -> str:
    """The result for readers."""
    lines = [
        f"# Fly, {date}",
        "",
        f"`make bench-fly`: model {plan.model.name}, {plan.rounds} rounds, one system at a time on one cluster, in "
        "turn: layout pinned to the widest tp group, pinned to dp, and left to the planner with its default "
        "configuration. Every system of a round gets requests of the same lengths at the same times (Poisson).",
        f"Requests: streamed chat, {plan.min_words} to {plan.max_words} words, {plan.min_output} to {plan.max_output} "
        "output tokens, greedy. Medians over the rounds; ratios are medians of the rounds' ratios.",
        "All instances, the ingress, the controller and the client share the cores of one machine: there tp brings "
        "little, so the ratio to our own static lanes is what counts.",
        f"Engine flags: `{json.dumps(dict(plan.engine))}`.",
        "",
        facts_line(),
        "",
    ]
    if "bursty" in capacity:
        lines += [
            "## Bursty load",
            "",
            f"{plan.num_instances} instances. Saturated static dp completes {capacity['bursty']:.1f} requests/s; "
            f"{plan.low_s:g} s at {plan.low_share:.0%} of that, {plan.burst_s:g} s at {plan.burst_share:.0%}, "
            f"{plan.after_s + plan.low_s:g} s at {plan.low_share:.0%}. Of the last, the first {plan.after_s:g} s are "
            "shown apart: there what the burst left ends, and the planner waits its dwell before it merges again. "
            f"Peak: the best {plan.window_s:g} s.",
            "",
            *(f"- {sentence}" for sentence in aims(runs)),
            "",
            *table(heading("bursty"), rows(runs, "bursty")),
            "",
        ]
    if "mix" in capacity:
        low, high = plan.mix_shares
        lines += [
            "## Priority mix (Table 1 of Flying Serving)",
            "",
            f"{plan.num_mix_instances} instances. Saturated static dp completes {capacity['mix']:.1f} requests/s; "
            f"{plan.mix_s:g} s at {low:.0%} and {high:.0%} of that in turn, {plan.urgent_share:.0%} of the requests "
            "with priority. Static layouts serve first come, first served. PengServe makes a group for the urgent by "
            "hard preemption. The paper's ratios are of Llama-70B on 8 H200.",
            "",
            *table(heading("mix"), rows(runs, "mix")),
            "",
        ]
    lines += [f"- {sentence}" for sentence in failures(runs)]
    return "\n".join(lines).rstrip() + "\n"


def write(folder: Path, plan: Plan, capacity: Mapping[str, float], runs: Sequence[Run], date: str) -> tuple[Path, Path]:
    """Writes everything as JSON and the tables as Markdown; their paths."""
    record = {
        "plan": plan_data(plan),
        "capacity_requests_per_s": dict(capacity),
        "runs": [asdict(run) for run in runs],
    }
    return write_result(folder, "fly", date, record, markdown(plan, capacity, runs, date))


def _cell(figure: Figure, found: Mapping[int, float]) -> str:
    return figure.shape.format(statistics.median(found.values()) * figure.factor) if found else "-"


def _ratio_cell(found: Sequence[float]) -> str:
    defined = [value for value in found if not math.isnan(value)]
    return f"x{statistics.median(defined):.2f}" if defined else "-"
