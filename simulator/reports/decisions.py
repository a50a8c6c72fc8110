"""What the planners decided in a run, what they predicted, and what became of it: a table of the page. Pure."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pengserve.planners.types.events import Event, EventKind
from pengserve.simulator.reports import words
from pengserve.simulator.reports.runs import Run

MOST = 40  # decisions of one run; the first ones
_HEAD = ("at", "decision", "price", "gain", "TTFT", "TPOT", "TTFT measured", "TPOT measured")


def decisions(runs: Sequence[Run]) -> str:
    """The section; empty where no run has predicted anything."""
    tables = []
    for run in runs:
        made = [e for e in run.result.events if e.kind is EventKind.PLAN_DECIDED and _chosen(e.data) is not None]
        if not made:
            continue
        outcomes = {e.span: e.data for e in run.result.events if e.kind is EventKind.PLAN_OUTCOME}
        lines = "".join(_line(event, outcomes.get(event.span, {})) for event in made[:MOST])
        more = f"<p>and {len(made) - MOST} more</p>" if len(made) > MOST else ""
        heading = f"<h3>{escape(run.title)}</h3>" if len(runs) > 1 else ""
        head = "".join(f"<th>{name}</th>" for name in _HEAD)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
        tables.append(f'{heading}<div class="scroll">{table}</div>{more}')
    if not tables:
        return ""
    note = "Prices and gains are request-seconds; predictions are means of the groups concerned, within the horizon."
    return f'<section id="decisions">\n<h2>Decisions</h2>\n<p>{note}</p>\n{"".join(tables)}\n</section>'


def _line(event: Event, outcome: Mapping[str, Any]) -> str:
    data = event.data
    predicted, measured = data.get("predicted") or {}, outcome.get("measured") or {}
    cells = [
        words.seconds(event.time_s),
        f"{data.get('action', '')} {data.get('group', '')}".strip(),
        words.seconds(data.get("price_s")),
        words.seconds(data.get("gain_s")),
        words.seconds(predicted.get("ttft_s")),
        words.seconds(predicted.get("tpot_s")),
        words.seconds(measured.get("ttft_s")),
        words.seconds(measured.get("tpot_s")),
    ]
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _chosen(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What was predicted of what was chosen."""
    return data.get("predicted") or None
