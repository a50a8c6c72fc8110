"""What a real PengServe run was like, from its request log and event log, so that simulated ones can stand beside it.

The request log (`request_log` of the settings) tells what arrived and how it was answered, the event log (`event_log`)
which layouts the cluster went through. Nothing tells how full its memory was, or when each token came: those parts of
a report stay empty for the real run.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pengserve.planners.types.codec import from_data
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.layout import parse_groups
from pengserve.simulator.reports.layouts import plain_groups
from pengserve.simulator.requests import Outcome
from pengserve.simulator.result import Gaps, Moment, Result

MOST_MOMENTS = 3600
_ENDED_WELL = frozenset({"stop", "length", "repetition"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One line of a request log."""

    at_s: float  # since the Unix epoch
    prompt_tokens: int
    output_tokens: int
    priority: int
    ttft_s: float | None
    e2e_s: float | None
    finish: str
    instance: str | None

    @property
    def ended_well(self) -> bool:
        """Whether the answer is whole."""
        return self.e2e_s is not None and self.ttft_s is not None and self.finish in _ENDED_WELL


def read_request_log(path: Path) -> tuple[Logged, ...]:
    """The lines of a request log that generated a token, by arrival: the same ones that are replayed.

    Raises:
        ConfigError: names the file, and the row and field where one is wrong.
    """
    found = []
    for number, data in _objects(path):
        where = f"{path}, row {number}"
        output_tokens = _number(data, "output_tokens", where)
        if not output_tokens:
            continue
        found.append(
            Logged(
                at_s=_number(data, "at_s", where),
                prompt_tokens=int(_number(data, "prompt_tokens", where)),
                output_tokens=int(output_tokens),
                priority=int(data.get("priority") or 0),
                ttft_s=_number(data, "ttft_s", where) if data.get("ttft_s") is not None else None,
                e2e_s=_number(data, "e2e_s", where) if data.get("e2e_s") is not None else None,
                finish=str(data.get("finish", "")),
                instance=None if data.get("instance") is None else str(data["instance"]),
            )
        )
    if not found:
        raise ConfigError(f"{path} holds no request that generated a token: give the request log of a run")
    return tuple(sorted(found, key=lambda row: row.at_s))


def is_request_log(path: Path) -> bool:
    """Whether the first row of `path` tells how a request was answered. A file that cannot be read is none."""
    try:
        first = next(_objects(path), None)
    except (ConfigError, UnicodeDecodeError):
        return False
    return first is not None and {"at_s", "ttft_s", "e2e_s"} <= first[1].keys()


def read_events(path: Path) -> tuple[Event, ...]:
    """The events of an event log, by time.

    Raises:
        ConfigError: names the file and the row.
    """
    found = []
    for number, data in _objects(path):
        try:
            found.append(from_data(Event, data))
        except ValueError as error:
            raise ConfigError(
                f"{path}, row {number}: {error}; give an event log, or what `pengserve events --json` prints"
            ) from None
    return tuple(sorted(found, key=lambda event: event.time_s))


def real_result(
    rows: Sequence[Logged],
    events: Sequence[Event] = (),
    *,
    name: str = "real",
    window: tuple[float, float] | None = None,
) -> Result:
    """The run as reports take it. `window` is in seconds since the first request, as traces are cut.

    Raises:
        ConfigError: nothing arrived in that window.
    """
    start_s = rows[0].at_s + (window[0] if window else 0.0)
    stop_s = rows[0].at_s + window[1] if window else float("inf")
    rows = [row for row in rows if start_s <= row.at_s < stop_s]
    if window and not rows:
        raise ConfigError(f"no request of the log arrives in [{window[0]:g}, {window[1]:g}) s")
    if not window:
        start_s = rows[0].at_s
    outcomes = tuple(_outcome(number, row, start_s) for number, row in enumerate(rows))
    end_s = max(row.at_s + (row.e2e_s or 0.0) for row in rows) - start_s
    layouts = _layouts(events, start_s)
    return Result(
        name=name,
        policy="real",
        seed=0,
        config={"requests": len(rows), "first_at_s": rows[0].at_s, "events": len(events)},
        assumptions=_assumptions(rows, layouts),
        end_s=end_s,
        num_instances=_num_instances(rows, layouts),
        outcomes=outcomes,
        moments=_moments(rows, layouts, start_s, end_s),
        gaps=Gaps(edges_s=(0.0, 1.0), counts=(0,)),
        events=_inside(events, start_s, end_s),
    )


def _inside(events: Sequence[Event], start_s: float, end_s: float) -> tuple[Event, ...]:
    """The events of the run in its own time, and before them the layout that it began with."""
    shifted = [replace(event, time_s=event.time_s - start_s) for event in events]
    before = [event for event in shifted if event.time_s < 0 and event.kind is EventKind.LAYOUT_CHANGED]
    return (*before[-1:], *(event for event in shifted if 0 <= event.time_s <= end_s))


def _outcome(number: int, row: Logged, start_s: float) -> Outcome:
    arrived_s = row.at_s - start_s
    return Outcome(
        request_id=f"{number}",
        arrived_s=arrived_s,
        prompt_tokens=row.prompt_tokens,
        output_tokens=row.output_tokens,
        scheduled_s=None,
        first_token_s=None if row.ttft_s is None else arrived_s + row.ttft_s,
        end_s=arrived_s + row.e2e_s if row.ended_well and row.e2e_s is not None else None,
        longest_gap_s=0.0,
        num_preemptions=0,
        num_moves=0,
        priority=row.priority,
    )


def _moments(
    rows: Sequence[Logged], layouts: Sequence[tuple[float, str]], start_s: float, end_s: float
) -> tuple[Moment, ...]:
    """Requests in flight and the KV they would hold, taking tokens to come evenly between the first and the last."""
    times = _times(layouts, end_s)
    found, active, following = [], list[Logged](), 0
    generated_before = 0.0
    for at_s in times:
        now_s = start_s + at_s
        while following < len(rows) and rows[following].at_s <= now_s:
            active.append(rows[following])
            following += 1
        ended = sum(row.output_tokens for row in active if _end_s(row) <= now_s)
        active = [row for row in active if _end_s(row) > now_s]
        shares = [row.output_tokens * _share(row, now_s) for row in active]
        held = sum(row.prompt_tokens for row in active) + sum(shares)
        running = [row for row in active if row.ttft_s is not None and row.at_s + row.ttft_s <= now_s]
        used = sum(row.prompt_tokens + row.output_tokens * _share(row, now_s) for row in running)
        found.append(
            Moment(
                at_s=at_s,
                groups=next((groups for since_s, groups in reversed(layouts) if since_s <= at_s), ""),
                num_running=len(running),
                num_waiting=len(active) - len(running),
                num_unplaced=0,
                used_tokens=round(used),
                held_tokens=0,  # no log tells
                demand_tokens=round(held),
                generated_tokens=max(0, round(sum(shares) + ended - generated_before)),
            )
        )
        generated_before = sum(shares)
    return tuple(found)


def _times(layouts: Sequence[tuple[float, str]], end_s: float) -> list[float]:
    """Every so often, and when the layout changed."""
    step_s = max(0.25, end_s / MOST_MOMENTS)
    regular = [index * step_s for index in range(int(end_s / step_s) + 1)]
    return sorted({*regular, *(since_s for since_s, _ in layouts if 0 <= since_s <= end_s)})


def _share(row: Logged, now_s: float) -> float:
    """How much of its answer it has at `now_s`."""
    if row.ttft_s is None or row.e2e_s is None or now_s < row.at_s + row.ttft_s:
        return 0.0
    spread_s = row.e2e_s - row.ttft_s
    return min(1.0, (now_s - row.at_s - row.ttft_s) / spread_s) if spread_s > 0 else 1.0


def _end_s(row: Logged) -> float:
    return row.at_s + (row.e2e_s or 0.0)


def _layouts(events: Sequence[Event], start_s: float) -> list[tuple[float, str]]:
    """(since when, groups) of each layout, in seconds since `start_s`; the first may begin before.

    Raises:
        ConfigError: an event names what is no group.
    """
    found = []
    for event in events:
        if event.kind is EventKind.LAYOUT_CHANGED and event.data.get("groups"):
            text = plain_groups(str(event.data["groups"]))
            try:
                parse_groups(text)
            except ValueError as error:
                raise ConfigError(f"event {event.seq} of the event log: {error}") from None
            found.append((event.time_s - start_s, text))
    return found


def _num_instances(rows: Sequence[Logged], layouts: Sequence[tuple[float, str]]) -> int:
    members = [member for _, text in layouts for group in parse_groups(text) for member in group.members]
    slots = [int(row.instance.split(".")[0]) for row in rows if row.instance and row.instance.split(".")[0].isdigit()]
    return max([0, *members, *slots]) + 1


def _assumptions(rows: Sequence[Logged], layouts: Sequence[tuple[float, str]]) -> tuple[str, ...]:
    num_left = sum(not row.ended_well for row in rows)
    found = ["Of the real run its logs are known: room for KV, times in queues and times between tokens are not."]
    found.append("Requests that the real run refused are in no log, and are not replayed.")
    if num_left:
        found.append(
            f"{num_left} requests of the real run did not end well; they are replayed with the tokens they got."
        )
    if not layouts:
        found.append("No event log was given, or it tells no layout: the layouts of the real run are not known.")
    return tuple(found)


def _objects(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    data = json.loads(line)
                except ValueError:
                    raise ConfigError(f"{path}, row {number}: not a JSON object; give one a line") from None
                if not isinstance(data, dict):
                    raise ConfigError(f"{path}, row {number}: not a JSON object; give one a line")
                yield number, data
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _number(data: Mapping[str, Any], name: str, where: str) -> float:
    value = data.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != value:
        raise ConfigError(f"{where}: field {name} must be a number, 0 or more, got {value!r}")
    return value
