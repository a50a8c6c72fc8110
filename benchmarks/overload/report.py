"""Medians over rounds, PengServe's ratios to the other systems, how the aims were met, and the files of a run."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.figures import ratio
from benchmarks.harness import MIB
from benchmarks.overload import plot
from benchmarks.overload.load import Plan
from benchmarks.overload.measure import SYSTEMS, Run, Size
from benchmarks.result_files import facts_line, plan_data, result_stem, table, write_result

SUBJECT, BASELINE = "drop", "vllm-dp"
NAMES = {
    "vllm-dp": "vLLM data parallel",
    "vllm-pp": "vLLM pipeline parallel",
    "dp": "PengServe without drop",
    "pp": "PengServe, static pipeline",
    "drop": "PengServe with drop",
}
Get = Callable[[Run], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of a table."""

    title: str
    get: Get
    shape: str = "{:.0f}"
    has_ratio: bool = False


def _ms(title: str, attribute: str, shape: str = "{:.0f}") -> Figure:
    return Figure(title=title, get=lambda run: 1e3 * float(getattr(run, attribute)), shape=shape, has_ratio=True)


TTFT_P99 = _ms("TTFT P99 (ms)", "ttft_p99_s")
TPOT_P50 = _ms("TPOT P50 (ms)", "tpot_p50_s", "{:.1f}")
FIGURES = (
    _ms("TTFT P50 (ms)", "ttft_p50_s"),
    _ms("TTFT P90 (ms)", "ttft_p90_s"),
    TTFT_P99,
    _ms("TTFT P99 of the bursts' requests (ms)", "burst_ttft_p99_s"),
    TPOT_P50,
    _ms("TPOT P99 (ms)", "tpot_p99_s", "{:.1f}"),
    _ms("longest gap between two texts of an answer, P99 (ms)", "gap_p99_s"),
    Figure(title="longest silence of a server that had requests (s)", get=lambda run: run.silence_s, shape="{:.1f}"),
    Figure(title="requests that a burst adds", get=lambda run: run.burst_requests),
    Figure(title="preemptions", get=lambda run: run.preemptions),
    Figure(title="failed requests", get=lambda run: run.failed),
    Figure(title="mean demand over what dp holds", get=lambda run: run.demand_mean, shape="{:.2f}"),
    Figure(title="peak demand over what dp holds", get=lambda run: run.demand_peak, shape="{:.2f}"),
    Figure(title="drop periods", get=lambda run: len(run.timeline.drops)),
    Figure(title="time dropped (s)", get=lambda run: sum(b - a for a, b in run.timeline.drops), shape="{:.1f}"),
    Figure(
        title="cores' time that the machine's host gave to others (%)", get=lambda run: 100 * run.stolen, shape="{:.1f}"
    ),
)
LEAST_TTFT_FACTOR = 10.0  # data parallel's P99 TTFT over PengServe's
MOST_TPOT_RATIO = 1.25  # PengServe's P50 TPOT over data parallel's
MOST_TTFT_RATIO = 1.1  # PengServe's P99 TTFT over data parallel's, where compute is short
STANDS_STILL_S = 10.0  # a server that had requests and sent nothing for longer stood still: no figure of it counts
MOST_BACK_S = 10.0  # from a burst's end until the layout is dp


def values(runs: Iterable[Run], figure: Figure, system: str) -> dict[int, float]:
    """Round -> the figure."""
    return {run.round_index: figure.get(run) for run in runs if run.system == system}


def ratios(runs: Sequence[Run], figure: Figure, subject: str, other: str) -> list[float]:
    """One system's figure over another's, one for each round that both took part in: the load is the same."""
    ours, theirs = values(runs, figure, subject), values(runs, figure, other)
    return [ratio(ours[index], theirs[index]) for index in sorted(ours.keys() & theirs.keys())]


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """Rows of one size's table: medians over the rounds, and behind those of others PengServe's ratio to them."""
    systems = ran(runs)
    found = [[figure.title, *(_cell(runs, figure, system) for system in systems)] for figure in FIGURES]
    backs = [_backs([run for run in runs if run.system == system]) for system in systems]
    return [*found, ["from a burst's end until the layout is dp (s), longest", *backs]]


def ran(runs: Iterable[Run]) -> list[str]:
    """The systems that ran, in the order of the table."""
    seen = {run.system for run in runs}
    return [system for system in SYSTEMS if system in seen]


def aims(runs: Sequence[Run], *, is_compute_bound: bool = False) -> list[str]:
    """One sentence for each aim, for the runs of one size."""
    ours = [run for run in runs if run.system == SUBJECT]
    if not ours:
        return []
    if is_compute_bound:
        num_drops = sum(len(run.timeline.drops) for run in ours)
        sentences = _at_most("P99 TTFT", runs, TTFT_P99, MOST_TTFT_RATIO)
        sentences.append(f"drop periods: {num_drops}; the aim is none: {_met(not num_drops)}")
    else:
        sentences = _far_below("P99 TTFT", runs, TTFT_P99, LEAST_TTFT_FACTOR)
    sentences += _at_most("P50 TPOT", runs, TPOT_P50, MOST_TPOT_RATIO)
    failed = sum(run.failed for run in ours)
    sentences.append(f"failed requests: {failed}; the aim is none: {_met(not failed)}")
    backs = [back for run in ours for back in run.timeline.backs_s]
    if backs:
        known = [back for back in backs if back is not None]
        is_met = len(known) == len(backs) and max(known) <= MOST_BACK_S
        sentences.append(
            f"seconds from a burst's end until the layout is dp: {_longest(backs)} at most, over {len(backs)} bursts; "
            f"the aim is {MOST_BACK_S:.0f}: {_met(is_met)}"
        )
    return sentences


def _far_below(title: str, runs: Sequence[Run], figure: Figure, least: float) -> list[str]:
    """The sentence about a figure that is to be so many times below data parallel's; none without ratios."""
    factors = [1 / r for r in ratios(runs, figure, SUBJECT, BASELINE) if r > 0]
    if not factors:
        return []
    middle = statistics.median(factors)
    return [
        f"{title}: {middle:.1f} times below {NAMES[BASELINE]} (rounds {min(factors):.1f} to {max(factors):.1f}); "
        f"the aim is at least {least:.0f}: {_met(middle >= least)}"
    ]


def _at_most(title: str, runs: Sequence[Run], figure: Figure, most: float) -> list[str]:
    """The sentence about a figure that is to be at most so many times data parallel's; none without ratios."""
    found = [r for r in ratios(runs, figure, SUBJECT, BASELINE) if not math.isnan(r)]
    if not found:
        return []
    middle = statistics.median(found)
    return [
        f"{title}: x{middle:.2f} of {NAMES[BASELINE]} (rounds {min(found):.2f} to {max(found):.2f}); "
        f"the aim is at most x{most:.2f}: {_met(middle <= most)}"
    ]


def failures(runs: Iterable[Run]) -> list[str]:
    """One sentence for every run in which something failed."""
    return [
        f"{NAMES[r.system]}, {r.num_instances} instances, round {r.round_index + 1}: {r.failed} requests and "
        f"{len(r.switch_errors)} switches failed"
        + "".join(f" ({why})" for why in (r.first_error, *r.switch_errors) if why)
        for r in runs
        if r.failed or r.switch_errors
    ]


def standstills(runs: Iterable[Run]) -> list[str]:
    """One sentence for every run in which a server stood still."""
    return [
        f"{NAMES[r.system]}, {r.num_instances} instances, round {r.round_index + 1}: a server that had requests sent "
        f"nothing for {r.silence_s:.0f} s. Run this round again; its figures say nothing."
        for r in runs
        if r.silence_s > STANDS_STILL_S
    ]


def run_line(run: Run) -> str:
    """One run in few words."""
    ttft = f"TTFT P50 {1e3 * run.ttft_p50_s:.0f} ms, P99 {1e3 * run.ttft_p99_s:.0f} ms"
    shares = f"demand {run.demand_mean:.2f} on average, {run.demand_peak:.2f} at most"
    backs = f"; seconds to dp: {_backs([run])}" if run.timeline.drops else ""
    stolen = f"; {run.stolen:.0%} of the cores' time stolen" if run.stolen >= 0.01 else ""
    still = f"; a server was silent for {run.silence_s:.0f} s" if run.silence_s > STANDS_STILL_S else ""
    return (
        f"{ttft}, TPOT P50 {1e3 * run.tpot_p50_s:.1f} ms; {shares}; {run.preemptions} preemptions{backs}{stolen}{still}"
    )


def load_line(plan: Plan, size: Size) -> str:
    """What the load of a size is, and what it was made from."""
    found, course = size.calibration, size.course
    least, most = plan.output_tokens
    if plan.is_compute_bound:
        return (
            f"Static dp answers {found.full.requests_per_s:.1f} requests/s with {found.full.in_flight} in flight, of "
            f"{found.prompt_tokens:.0f} prompt tokens on average and {least} to {most} output tokens. So "
            f"{course.low_per_s:.1f} requests/s, and {course.num_bursts} bursts of {course.burst_requests} more within "
            f"{course.burst_s:.1f} s, each followed by {course.calm_s:.0f} s of calm. dp holds {found.dp_tokens} "
            "tokens of KV in all."
        )
    return (
        f"Weights {size.weight_bytes / MIB:.0f} MiB of {plan.memory_bytes / MIB:.0f} MiB an instance "
        f"({size.weight_bytes / plan.memory_bytes:.0%}); dp holds {found.dp_tokens} tokens of KV in all, pipelines "
        f"of {plan.stages} {found.gain:.0%} more. A request has {found.prompt_tokens:.0f} prompt tokens on average and "
        f"{least} to {most} output tokens, and lives {found.few.life_s:.1f} s among {found.few.in_flight}, "
        f"{found.full.life_s:.1f} s among {found.full.in_flight} (measured on static dp). {_rehearsed(size)}"
        f"So in the last round: {course.low_per_s:.2f} requests/s, and {course.num_bursts} bursts of "
        f"{course.burst_requests} more within {course.burst_s:.1f} s, each followed by {course.calm_s:.0f} s of calm."
    )


def _rehearsed(size: Size) -> str:
    if not size.rehearsals:
        return ""
    counts = ", ".join(f"{rehearsal.burst_requests}" for rehearsal in size.rehearsals)
    shares = ", ".join(f"{rehearsal.demand_peak:.2f}" for rehearsal in size.rehearsals)
    return (
        f"Rehearsed on {NAMES[BASELINE]}, before each round anew, bursts of {counts} more came to {shares} of what dp "
        f"holds; the last ones to {size.calibration.came:.0%} of what the levels predict. "
    )


def markdown(plan: Plan, size: Size, runs: Sequence[Run], date: str, plot_name: str) -> str:
    """The result for readers; `plot_name` is the plot's file."""
    names = [NAMES[system] for system in ran(runs)]
    rounds = f"{plan.rounds} round" + "s" * (plan.rounds != 1)
    lines = [
        f"# Overload of {size.num_instances} instances, {date}",
        "",
        f"`make bench-overload`: model {plan.model.name}, {rounds}, one system at a time, in turn. Every "
        "system of a round gets requests of the same lengths at the same times.",
        _wanted(plan),
        "Medians over the rounds; (x…) behind a figure: PengServe's with drop over this one, median of the rounds' "
        "ratios. TTFT from sending a request to its first text. A burst ends when its last request is sent.",
        "All instances, the ingress, the controller and the client share the cores of one machine; what computes of an "
        "instance keeps to one core, neighbours to the same one, but for vLLM's pipelines, whose stages spin while "
        "they wait.",
        f"vLLM data parallel: one server an instance, worker in the engine's process; the client sends each request to "
        f"the one with the fewest in flight. vLLM pipeline parallel: a server for each {plan.stages} instances, "
        "a worker process a stage.",
        f"Engine flags: `{json.dumps(dict(plan.engine))}`; KV bytes as the memory of an instance leaves.",
        "",
        facts_line(),
        "",
        load_line(plan, size),
        "",
        *(f"- {sentence}" for sentence in aims(runs, is_compute_bound=plan.is_compute_bound)),
        "",
        *table(["", *names], rows(runs)),
        "",
        f"![Demand, capacity and TTFT over time]({plot_name})",
        "",
        *(f"- {sentence}" for sentence in (*failures(runs), *standstills(runs))),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _wanted(plan: Plan) -> str:
    if plan.is_compute_bound:
        return (
            f"In a burst {plan.peak_share:g} times as many requests come as dp answers; what runs needs little KV: "
            "compute is short, and not memory (`benchmarks/overload/compute.py`). Demand is what all requests in "
            "flight would hold."
        )
    return (
        f"Demand is what all requests in flight would hold. Its mean is planned as 1/{plan.headroom:g} of what dp has, "
        f"its peak, on {NAMES[BASELINE]}, as {plan.peak_share:g} times that; `benchmarks/overload/load.py` says how."
    )


def write(folder: Path, plan: Plan, size: Size, runs: Sequence[Run], date: str) -> tuple[Path, ...]:
    """Writes everything as JSON, the tables as Markdown and a plot; their paths."""
    bound = "-compute" if plan.is_compute_bound else ""
    name = f"overload{size.num_instances}{bound}-x{plan.peak_share:g}"
    plot_path = folder / f"{result_stem(name, date)}.svg"
    record = {"plan": plan_data(plan), "size": asdict(size), "runs": [asdict(run) for run in runs]}
    written = write_result(folder, name, date, record, markdown(plan, size, runs, date, plot_path.name))
    first = [run for run in runs if run.round_index == 0]
    drawing = plot.draw(sorted(first, key=lambda run: SYSTEMS.index(run.system)), NAMES)
    plot_path.write_text(drawing, encoding="utf-8")
    return (*written, plot_path)


def _cell(runs: Sequence[Run], figure: Figure, system: str) -> str:
    text = figure.shape.format(statistics.median(values(runs, figure, system).values()))
    found = ratios(runs, figure, SUBJECT, system) if figure.has_ratio and system != SUBJECT else []
    found = [value for value in found if not math.isnan(value)]
    return f"{text} (x{statistics.median(found):.2f})" if found else text


def _backs(runs: Sequence[Run]) -> str:
    backs = [back for run in runs for back in run.timeline.backs_s] if any(run.timeline.drops for run in runs) else []
    return _longest(backs) if backs else "-"


def _longest(backs: Sequence[float | None]) -> str:
    known = [back for back in backs if back is not None]
    return f"{max(known):.1f}" if len(known) == len(backs) else "never"


def _met(is_met: bool) -> str:
    return "met" if is_met else "missed"
