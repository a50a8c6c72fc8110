"""The append-only event log: JSON lines in a file, the newest ones in memory."""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any

from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.events import Event, EventKind

logger = logging.getLogger(__name__)

TAIL_BYTES = 1 << 20  # how much of an old log a new controller reads
TAIL_EVENTS = 4096  # kept in memory for `events`

_CLOSES: Mapping[EventKind, frozenset[EventKind]] = {
    EventKind.CONTROLLER_START: frozenset({EventKind.CONTROLLER_RECOVERED, EventKind.CONTROLLER_STOP}),
    EventKind.INSTANCE_START: frozenset({EventKind.INSTANCE_READY, EventKind.INSTANCE_ERROR}),
    EventKind.INSTANCE_DRAIN_START: frozenset({EventKind.INSTANCE_DRAIN_END, EventKind.INSTANCE_DRAIN_ERROR}),
    EventKind.TRANSITION_START: frozenset({EventKind.TRANSITION_END, EventKind.TRANSITION_ERROR}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An event before the log has given it a number and a time. State transitions return these."""

    kind: EventKind
    why: str = ""
    span: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


def open_starts(events: Iterable[Event]) -> tuple[Event, ...]:
    """The starts among `events`, oldest first, whose end or error is not there."""
    started: dict[tuple[EventKind, str], Event] = {}
    for event in events:
        if event.kind in _CLOSES:
            started[(event.kind, event.span)] = event
        for start, ends in _CLOSES.items():
            if event.kind in ends:
                started.pop((start, event.span), None)
    return tuple(started.values())


class EventLog:
    """Numbers events and writes each as one line, at once. Numbers continue over restarts of the controller.

    One writer a file. A line that a crash tore is left out, and the next event begins on a line of its own.
    A full or failing disk costs the file, never the controller: events stay readable in memory.
    """

    def __init__(self, path: str = "", *, wall_clock: Callable[[], float] = time.time) -> None:
        self._clock = wall_clock
        self._tail: deque[Event] = deque(maxlen=TAIL_EVENTS)
        self._file: FileIO | None = None
        if path:
            self._open(Path(path))
        self._next_seq = self._tail[-1].seq + 1 if self._tail else 1

    def append(self, changes: Iterable[Change]) -> tuple[Event, ...]:
        """Logs `changes` in order; returns them as events."""
        events = []
        for change in changes:
            event = Event(
                seq=self._next_seq,
                time_s=self._clock(),
                kind=change.kind,
                why=change.why,
                span=change.span,
                data=change.data,
            )
            self._next_seq += 1
            self._tail.append(event)
            events.append(event)
            logger.info("%s %s %s", event.kind, event.span, event.why)
        self._write(events)
        return tuple(events)

    def tail(self, after: int = 0, limit: int = 100) -> tuple[Event, ...]:
        """At most `limit` events with a number above `after`, the oldest of them first."""
        if not self._tail:
            return ()
        # Numbers in memory are consecutive but for torn lines, so this skips at most what it must and re-checks.
        skip = max(0, len(self._tail) - (self._next_seq - 1 - after))
        return tuple(islice((e for e in islice(self._tail, skip, None) if e.seq > after), max(0, limit)))

    def close(self) -> None:
        """Closes the file; later events stay in memory alone."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            self._tail.extend(_read_tail(path))
        self._file = path.open("ab", buffering=0)  # a line is with the system once it is written
        if self._file.tell() and not _ends_with_newline(path):
            self._file.write(b"\n")

    def _write(self, events: list[Event]) -> None:
        if self._file is None or not events:
            return
        try:
            for event in events:
                self._file.write(json.dumps(to_data(event), separators=(",", ":")).encode() + b"\n")
        except OSError:
            logger.exception("cannot write the event log; events are kept in memory alone from here on")
            self._file = None


def _read_tail(path: Path) -> list[Event]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().splitlines()
    if size > TAIL_BYTES:
        del lines[0]  # most likely the end of a line
    events = []
    for line in lines:
        try:
            events.append(from_data(Event, json.loads(line)))
        except ValueError:
            logger.warning("%s: left out a line that is no event", path)
    return events


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
