"""Tables of the papers' ratios and ours, what had to be assumed, why some do not come out, and the files of a run."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers.headline import Headline, Runs
from benchmarks.papers.headlines import headlines
from benchmarks.papers.measure import describe, measure
from benchmarks.papers.notes import ASSUMED, REASONS
from benchmarks.papers.scenarios import FOLDER, Run
from benchmarks.result_files import facts_line, table, write_result
from pengserve.simulator.reports.figures import figures_of

HEADING = ("row", "figure", "scenario", "baseline", "paper", "ours", "baseline's value", "PengServe's value")
_COLUMNS = (
    ("TTFT P50 s", "ttft_p50_s", "{:.2f}"),
    ("P90 s", "ttft_p90_s", "{:.2f}"),
    ("P99 s", "ttft_p99_s", "{:.2f}"),
    ("P99.9 s", "ttft_p99.9_s", "{:.2f}"),
    ("TPOT P50 ms", "tpot_p50_s", "{:.1f}"),
    ("P99 ms", "tpot_p99_s", "{:.1f}"),
    ("TBT P99 ms", "tbt_p99_s", "{:.0f}"),
    ("TBT kept", "tbt_kept", "{:.1%}"),
    ("tokens/s", "tokens_per_s", "{:,.0f}"),
    ("peak tokens/s", "peak_tokens_per_s", "{:,.0f}"),
    ("mean demand", "demand_mean", "{:.0%}"),
    ("peak demand", "demand_peak", "{:.0%}"),
    ("peak room", "room_peak", "{:.0%}"),
    ("preempted", "preemptions", "{:.0f}"),
    ("CPU s", "simulated_in_cpu_s", "{:.0f}"),
)


def figures(runs: Sequence[Run]) -> Runs:
    """What was measured, by scenario and label."""
    return {(run.scenario, run.label): measure(run) for run in runs}


def able(found: Runs) -> list[Headline]:
    """The headlines whose scenario ran with both of its policies."""
    return [h for h in headlines() if (h.scenario, h.baseline) in found and (h.scenario, h.subject) in found]


def headline_rows(found: Runs) -> list[list[str]]:
    """Rows of the first table."""
    rows = []
    for headline in able(found):
        theirs, ours = headline.values(found)
        words = [headline.row, headline.what, headline.scenario, headline.baseline, headline.paper]
        rows.append(
            [
                *words,
                _better(headline, headline.ratio(found)),
                _value(theirs, headline.unit),
                _value(ours, headline.unit),
            ]
        )
    return rows


def scenario_rows(runs: Sequence[Run], found: Runs, scenario: str) -> list[list[str]]:
    """Rows of one scenario's table: a run each."""
    rows = []
    for run in runs:
        if run.scenario == scenario:
            one = found[scenario, run.label]
            cells = [_show(one, name, shape) for _, name, shape in _COLUMNS]
            rows.append([run.label, *cells, describe(figures_of(run.result))])
    return rows


def text(runs: Sequence[Run], found: Runs) -> str:
    """The whole report in Markdown."""
    lines = [
        "# The papers' headline figures, simulated", "",
        f"`make bench-papers`. Virtual time on {facts_line()}", "",
        "A ratio above 1 says that PengServe is better: baseline / PengServe for latencies, PengServe / baseline for"
        " rates and for times until memory is full. Every policy runs the same requests. Ratios are printed as they"
        " come out.",
        "",
        *table(HEADING, headline_rows(found), num_words=5), "",
    ]  # fmt: skip
    heading = ("policy", *(title for title, _, _ in _COLUMNS), "dropped")
    for scenario in dict.fromkeys(run.scenario for run in runs):
        lines += [f"## {scenario}", "", f"`simulator/scenarios/{scenario}.yaml` says what is from the paper.", ""]
        lines += [*table(heading, scenario_rows(runs, found, scenario)), ""]
        lines += ["Demand and room are shares of what all instances hold alone.", ""]
        lines += _list("Assumed", (*ASSUMED[scenario], *_assumptions(runs, scenario)))
        lines += _list("Where it does not come out, and why", REASONS[scenario])
    return "\n".join(lines).rstrip() + "\n"


def write(folder: Path, runs: Sequence[Run], date: str, name: str = "papers") -> tuple[Path, Path]:
    """Writes the report and all figures; their paths."""
    found = figures(runs)
    scenarios = dict.fromkeys(run.scenario for run in runs)
    record: dict[str, Any] = {
        "scenarios": {scenario: (FOLDER / f"{scenario}.yaml").read_text() for scenario in scenarios},
        "headlines": [_record(headline, found) for headline in able(found)],
        "runs": [
            {"scenario": run.scenario, "label": run.label, "policy": run.config.policy.model_dump()}
            | _plain(found[run.scenario, run.label])
            for run in runs
        ],
    }  # fmt: skip
    return write_result(folder, name, date, record, text(runs, found))


def _record(headline: Headline, found: Runs) -> dict[str, Any]:
    theirs, ours = headline.values(found)
    words = {name: getattr(headline, name) for name in ("row", "what", "scenario", "baseline", "subject", "paper")}
    return words | _plain({"ratio": headline.ratio(found), "baseline_value": theirs, "our_value": ours})


def _plain(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no value for what is not a number."""
    return {name: None if math.isnan(value) else round(value, 6) for name, value in values.items()}


def _assumptions(runs: Sequence[Run], scenario: str) -> list[str]:
    return list(dict.fromkeys(text for run in runs if run.scenario == scenario for text in run.result.assumptions))


def _list(title: str, sentences: Sequence[str]) -> list[str]:
    return [f"{title}:", "", *(f"- {sentence}" for sentence in sentences), ""] if sentences else []


def _better(headline: Headline, value: float) -> str:
    if headline.is_points and not math.isnan(value):
        return f"{value:+.0f} points"
    return "never in this run" if math.isnan(value) else f"{value:.2f}x"


def _value(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.0f} ms"
    if unit == "%":
        return f"{100 * value:.1f} %"
    if (unit == "/s" and value >= 100) or unit == " blocks":
        return f"{value:,.0f} {unit.strip()}"
    return f"{value:.2f} {unit}" if unit.startswith("/") else f"{value:.1f}{unit}"


def _show(one: Mapping[str, float], name: str, shape: str) -> str:
    value = one.get(name, math.nan) * (1e3 if name.startswith(("tpot_p", "tbt_p")) else 1)
    return "-" if math.isnan(value) else shape.format(value)
