"""`pengserve why`: the life of one request, from the request log and the event log. Reads, and changes nothing."""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from pengserve.client import PengServe
from pengserve.cluster.cli.output import output_console
from pengserve.cluster.cli.shape_views import describe_decision, describe_phases, format_seconds
from pengserve.planners.types.codec import from_data
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.events import Event, EventKind

EVENT_PAGE = 1000
MARGIN_S = 1.0  # clocks of machines differ a little
_NOTE = re.compile(r"([\d.]+) (.+) (\d+\.\d+)$")
_TOLD = {
    "sent": "sent to {}",
    "carried": "went on at {} with its KV",
    "handed back": "{} handed it back",
    "lost": "{} was lost",
    "resumed": "computed again at {}, from its prompt and the tokens that it had",
}
_OF_INSTANCES = frozenset(
    {
        EventKind.INSTANCE_LOST,
        EventKind.INSTANCE_ERROR,
        EventKind.INSTANCE_DRAIN_START,
        EventKind.INSTANCE_DRAIN_END,
        EventKind.INSTANCE_DRAIN_ERROR,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Something that happened to a request, or to the cluster around it."""

    after_s: float  # seconds after the request came
    what: str
    is_around: bool = False  # of the cluster, from the event log


def run_why(
    request_id: str,
    request_log: Path,
    event_log: Path | None,
    url: str,
    admin_key: str | None,
) -> None:
    """Print the life of each sequence of a request. Events are read from `event_log`, or asked of the application.

    Raises:
        ConfigError: a file cannot be read, or no request of this id ended. PengServeError: no server answers.
    """
    rows = list(find(request_id, _lines(request_log)))
    if not rows:
        raise ConfigError(
            f"{request_log} has no request {request_id!r}: it may still run, or its line is gone with an older file"
        )
    events = _ask(url, admin_key) if event_log is None else [from_data(Event, row) for row in _lines(event_log)]
    console = output_console()
    for row in rows:
        console.print(headline(row), highlight=False, markup=False, soft_wrap=True)
        console.print(table(row, life(row, events)))


def find(request_id: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The lines of a request: vLLM puts its own words before the id that the client knows, and a number behind it."""
    named = re.compile(rf"(?:^|[-_]){re.escape(request_id)}(?:-\d+)?$")
    return (row for row in rows if named.search(str(row.get("request_id", ""))))


def life(row: Mapping[str, Any], events: Sequence[Event]) -> list[Step]:
    """What happened to the request of a line of the request log, in order."""
    steps = [Step(after_s=0.0, what="it came")]
    stays: list[tuple[float, str]] = []
    for note in str(row.get("life", "")).split("; "):
        found = _NOTE.match(note)
        if found is None:
            continue
        after_s, what, where = float(found[1]), found[2], found[3]
        if what in ("sent", "resumed", "carried"):
            stays.append((after_s, where))
        told = f"{where} runs {what.removeprefix('shape ')} from here on" if what.startswith("shape ") else ""
        steps.append(Step(after_s=after_s, what=told or _TOLD.get(what, what + " {}").format(where)))
    if row.get("ttft_s") is not None:
        steps.append(Step(after_s=float(row["ttft_s"]), what="its first token"))
    steps.append(Step(after_s=float(row["e2e_s"]), what=f"it ended: {row.get('finish')}"))
    steps += _around(row, stays, events)
    return sorted(steps, key=lambda step: step.after_s)


def headline(row: Mapping[str, Any]) -> str:
    """One line that tells the request."""
    ttft = "no token" if row.get("ttft_s") is None else f"first token after {format_seconds(row['ttft_s'])}"
    return (
        f"{row.get('request_id')}: {row['prompt_tokens']:,} prompt tokens, {row['output_tokens']:,} output tokens,"
        f" {ttft}, in all {format_seconds(row['e2e_s'])}"
    )


def table(row: Mapping[str, Any], steps: Sequence[Step]) -> Table:
    """The steps with their times and the waits between those of the request."""
    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(justify="right", no_wrap=True)
    shown.add_column(overflow="fold")
    for step in steps:
        at_s = float(row["at_s"]) + step.after_s
        clock = time.strftime("%H:%M:%S", time.localtime(at_s)) + f".{int(at_s % 1 * 1000):03d}"
        shown.add_row(clock, f"+{format_seconds(step.after_s)}", step.what, style="dim" if step.is_around else "")
    return shown


def _around(row: Mapping[str, Any], stays: Sequence[tuple[float, str]], events: Sequence[Event]) -> Iterator[Step]:
    """Events about the instances that the request was on, while it was there."""
    began_s, took_s = float(row["at_s"]), float(row["e2e_s"])
    ends_s = [after_s for after_s, _ in stays[1:]] + [took_s]
    for event in events:
        after_s = event.time_s - began_s
        for (start_s, where), end_s in zip(stays, ends_s, strict=False):
            if start_s - MARGIN_S <= after_s <= end_s + MARGIN_S and _concerns(event, where):
                if what := _event(event):
                    yield Step(after_s=after_s, what=what, is_around=True)
                break


def _concerns(event: Event, where: str) -> bool:
    if event.kind in _OF_INSTANCES:
        return event.span.endswith(f":{where}")
    slot = where.partition(".")[0]
    group = str(event.data.get("what") or event.data.get("group") or "")
    found = re.search(r"@\(([\d,]+)\)", group)
    return found is not None and slot in found[1].split(",")


def _event(event: Event) -> str:
    """What an event says; empty for those that tell nothing here."""
    tell = _EVENTS.get(event.kind)
    if tell is not None:
        return tell(event)
    return f"{event.kind.value.replace('_', ' ')} {event.span}: {event.why}" if event.kind in _OF_INSTANCES else ""


_EVENTS: Mapping[EventKind, Callable[[Event], str]] = {
    EventKind.PLAN_DECIDED: lambda e: f"decided: {describe_decision(e.data)}; why: {e.why}",
    EventKind.TRANSITION_START: lambda e: f"{e.data.get('what')} began; why: {e.why}",
    EventKind.TRANSITION_END: lambda e: f"{e.data.get('what')} is done: {describe_phases(e.data)}",
    EventKind.TRANSITION_ERROR: lambda e: f"{e.data.get('what')} was given up: {e.why}",
}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines of a log and its renamed predecessors, the oldest first."""
    older = sorted(
        (file for file in path.parent.glob(f"{path.name}.*") if file.suffix[1:].isdecimal()),
        key=lambda file: -int(file.suffix[1:]),
    )
    try:
        for file in (*older, path):
            with file.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    try:
                        row = json.loads(line)
                    except ValueError:
                        continue  # torn by a crash
                    if isinstance(row, dict):
                        yield row
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _ask(url: str, admin_key: str | None) -> list[Event]:
    events: list[Event] = []
    with PengServe(url, admin_key=admin_key) as client:
        while True:
            page = client.events(after=events[-1].seq if events else 0, limit=EVENT_PAGE)
            events += page
            if len(page) < EVENT_PAGE:
                return events
