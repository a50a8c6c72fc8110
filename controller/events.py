"""The append-only event log: JSON lines in a file, the newest ones in memory."""

import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pengserve.controller.line_file import DEFAULT_LIMITS, FileLimits, LineFile, Write
from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.events import Event, EventKind

logger = logging.getLogger(__name__)

TAIL_BYTES = 1 << 20  # how much of an old log a new controller reads
TAIL_EVENTS = 4096  # kept in memory for `events`
RETRY_S = 30.0  # after a write that failed

_CLOSES: Mapping[EventKind, frozenset[EventKind]] = {
    EventKind.CONTROLLER_START: frozenset({EventKind.CONTROLLER_RECOVERED, EventKind.CONTROLLER_STOP}),
    EventKind.INSTANCE_START: frozenset({EventKind.INSTANCE_READY, EventKind.INSTANCE_ERROR}),
    EventKind.INSTANCE_DRAIN_START: frozenset({EventKind.INSTANCE_DRAIN_END, EventKind.INSTANCE_DRAIN_ERROR}),
    EventKind.TRANSITION_START: frozenset({EventKind.TRANSITION_END, EventKind.TRANSITION_ERROR}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EventDraft:
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

    A line that a crash tore is left out. A full or failing disk costs lines of the file, never the controller: events
    stay readable in memory, and the file is tried again after a while.
    """

    def __init__(
        self,
        path: str = "",
        *,
        limits: FileLimits = DEFAULT_LIMITS,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        write: Write = os.write,
    ) -> None:
        """An empty `path` keeps events in memory alone. `write` stands for `os.write`, for tests."""
        self._wall_clock, self._clock = wall_clock, clock
        self._tail: deque[Event] = deque(maxlen=TAIL_EVENTS)
        self._file = LineFile(Path(path), limits, write) if path else None
        self._retry_at_s: float | None = None  # while the disk fails
        self._num_missing = 0  # in the file, since then
        if self._file is not None:
            self._tail.extend(_read_tail(self._file))
        self._next_seq = max((event.seq for event in self._tail), default=0) + 1

    def append(self, changes: Iterable[EventDraft]) -> tuple[Event, ...]:
        """Logs `changes` in order; returns them as events. Raises nothing, however the disk is."""
        events = []
        for change in changes:
            event = Event(
                seq=self._next_seq,
                time_s=self._wall_clock(),
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
        if after >= self._next_seq - 1:
            return ()
        return tuple(islice((event for event in self._tail if event.seq > after), max(0, limit)))

    def close(self) -> None:
        """Later events stay in memory alone."""
        self._file = None

    def _write(self, events: list[Event]) -> None:
        if self._file is None or not events:
            return
        if self._retry_at_s is not None and self._clock() < self._retry_at_s:
            self._num_missing += len(events)
            return
        lines = "".join(json.dumps(to_data(e), separators=(",", ":"), default=str) + "\n" for e in events)
        try:
            self._file.append(lines.encode(errors="replace"))
        except OSError as error:
            if self._retry_at_s is None:
                logger.error("the event log cannot be written, and events are in memory alone for now: %s", error)
            self._retry_at_s = self._clock() + RETRY_S
            self._num_missing += len(events)
            return
        if self._retry_at_s is not None:
            logger.warning("the event log can be written again; %d events are missing in it", self._num_missing)
            self._retry_at_s, self._num_missing = None, 0


def _read_tail(file: LineFile) -> list[Event]:
    """The events at the end of the log; none where it cannot be read."""
    try:
        lines = file.tail(TAIL_BYTES)
    except OSError as error:
        logger.warning("the event log cannot be read, and this controller begins without it: %s", error)
        return []
    events = []
    for line in lines:
        try:
            events.append(from_data(Event, json.loads(line)))
        except (ValueError, RecursionError):
            if line.strip():
                logger.warning("%s: left out a line that is no event", file.path)
    return events
