"""Medians over rounds, ratios, and the files of a run."""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.figures import ratio
from benchmarks.overhead.load import Figures
from benchmarks.overhead.plan import Plan
from benchmarks.result_files import facts_line, plan_data, table, write_result

SHOWN = {
    "tokens_per_s": ("tokens/s", 1.0, "{:.0f}"),
    "ttft_p50_s": ("TTFT p50 ms", 1e3, "{:.1f}"),
    "ttft_p99_s": ("TTFT p99 ms", 1e3, "{:.1f}"),
    "itl_p50_s": ("ITL p50 ms", 1e3, "{:.2f}"),
    "itl_p99_s": ("ITL p99 ms", 1e3, "{:.2f}"),
    "tpot_p50_s": ("TPOT p50 ms", 1e3, "{:.2f}"),
    "machine_cpu_s": ("CPU s", 1.0, "{:.1f}"),
}
"""Figures of the tables: heading, factor, format."""

SUBJECT = "pengserve"
"""Ratios are this system's figure over the other's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One level of load, in one round, on one system."""

    system: str
    round_index: int
    start_s: float  # seconds that the system took to start in this round
    figures: Figures


def medians(samples: Sequence[Sample]) -> dict[tuple[str, int], dict[str, float]]:
    """(system, clients) -> the median of every shown figure over the rounds, in the order of first appearance."""
    grouped: dict[tuple[str, int], list[Figures]] = {}
    for sample in samples:
        grouped.setdefault((sample.system, sample.figures.num_clients), []).append(sample.figures)
    return {
        key: {name: statistics.median(getattr(figures, name) for figures in group) for name in SHOWN}
        for key, group in grouped.items()
    }


def table_rows(samples: Sequence[Sample]) -> list[list[str]]:
    """Rows of the table: clients, system, each figure, and behind those of other systems the subject's ratio to it."""
    middle = medians(samples)
    rows = []
    for clients in dict.fromkeys(clients for _, clients in middle):
        subject = middle.get((SUBJECT, clients))
        for system in dict.fromkeys(system for system, _ in middle):
            if (system, clients) not in middle:
                continue
            figures = middle[system, clients]
            cells = [_cell(name, figures[name], None if system == SUBJECT else subject) for name in SHOWN]
            rows.append([str(clients), system, *cells])
    return rows


def heading() -> list[str]:
    """Headings of the table."""
    return ["clients", "system", *(title for title, _, _ in SHOWN.values())]


def print_table(samples: Sequence[Sample], console: Console) -> None:
    """Prints the medians; `x0.98` behind a figure: PengServe's is 0.98 times that."""
    table = Table(title=f"Medians over the rounds; (x…) is {SUBJECT}'s figure over this one")
    for index, title in enumerate(heading()):
        table.add_column(title, justify="left" if index == 1 else "right")
    last = ""
    for row in table_rows(samples):
        if last and row[0] != last:
            table.add_section()
        last = row[0]
        table.add_row(*row)
    console.print(table)


def failures(samples: Iterable[Sample]) -> list[str]:
    """One sentence for every measurement in which a request failed."""
    return [
        f"{s.system}, {s.figures.num_clients} clients, round {s.round_index + 1}: {s.figures.failed} requests failed "
        f"({s.figures.first_error})"
        for s in samples
        if s.figures.failed
    ]


def write(
    folder: Path, plan: Plan, notes: Mapping[str, str], samples: Sequence[Sample], date: str
) -> tuple[Path, Path]:
    """Writes everything as JSON and the table as Markdown; their paths."""
    record = {
        "plan": plan_data(plan),
        "systems": dict(notes),
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }
    return write_result(folder, "overhead", date, record, markdown(plan, notes, samples, date))


def markdown(plan: Plan, notes: Mapping[str, str], samples: Sequence[Sample], date: str) -> str:
    """The result for readers."""
    command = "bench-overhead" if plan.device == "cpu" else "bench-gpu"
    order = (
        "all systems up and one at a time under load"
        if plan.num_sharing > 1
        else "one system at a time (idle Ray daemons and polling engines would take CPU from the others)"
    )
    lines = [
        f"# Overhead, {date}",
        "",
        f"`make {command}`: model {plan.model.name}, {plan.num_instances} instances, {plan.rounds} rounds, {order}, "
        "alternating.",
        f"Requests: streamed chat, {plan.output_tokens} output tokens, about "
        f"{statistics.mean(s.figures.prompt_tokens_mean for s in samples):.0f} prompt tokens, greedy.",
        f"Engine flags of all: `{json.dumps(dict(plan.engine))}`.",
        f"Medians over the rounds. (x…) behind a figure: {SUBJECT}'s figure over this one. ITL is the gap between two "
        "events of a stream as the client's socket delivered them; 0 where they came together. TPOT is per request.",
        "",
        facts_line(),
        "",
        *(f"- **{name}**: {note}" for name, note in notes.items()),
        "",
        *table(heading(), table_rows(samples), 2),
        "",
        *failures(samples),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _cell(name: str, value: float, subject: Mapping[str, float] | None) -> str:
    _, factor, shape = SHOWN[name]
    text = shape.format(value * factor)
    if subject is None or math.isnan(relation := ratio(subject[name], value)):
        return text
    return f"{text} (x{relation:.2f})"
