"""The event log: numbers that go on, lines that a crash tears, and ends for all starts."""

import json
from pathlib import Path

import pytest

from pengserve.controller.events import TAIL_BYTES, Change, EventLog, open_starts
from pengserve.planners.types.events import EventKind

CHANGE = Change(kind=EventKind.INSTANCE_START, span="instance:0.1", why="begin", data={"n": 1})


def test_numbers_go_on_over_restarts(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "events.jsonl")
    for expected in (1, 3, 5):
        log = EventLog(path)
        assert [event.seq for event in log.append([CHANGE, CHANGE])] == [expected, expected + 1]
        log.close()
    assert [event.seq for event in EventLog(path).tail()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("torn", [b'{"seq":3,"time_s":1.5,"ki', b"\xff\xfe", b"{}", b"[1]", b"7"])
def test_a_torn_last_line_costs_that_event_alone(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(str(path)).append([CHANGE, CHANGE])
    with path.open("ab") as file:
        file.write(torn)
    EventLog(str(path)).append([CHANGE])
    assert [event.seq for event in EventLog(str(path)).tail()] == [1, 2, 3]
    good = [line for line in path.read_bytes().splitlines() if line != torn]
    assert [json.loads(line)["seq"] for line in good] == [1, 2, 3]


def test_every_event_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), wall_clock=lambda: 12.5)
    (event,) = log.append([CHANGE])
    line = json.loads(path.read_text())
    assert line == {
        "seq": 1,
        "time_s": 12.5,
        "kind": "instance_start",
        "why": "begin",
        "span": "instance:0.1",
        "data": {"n": 1},
    }
    assert EventLog(str(path)).tail() == (event,)


def test_a_long_log_is_read_from_its_end_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(str(path)).append([Change(kind=EventKind.INSTANCE_ERROR, why="x" * 1000)] * 1200)
    assert path.stat().st_size > TAIL_BYTES
    (event,) = EventLog(str(path)).append([CHANGE])
    assert event.seq == 1201


def test_tail_gives_the_oldest_after_a_number() -> None:
    log = EventLog()
    log.append([CHANGE] * 5000)
    assert [e.seq for e in log.tail(after=4998)] == [4999, 5000]
    assert [e.seq for e in log.tail(after=4000, limit=3)] == [4001, 4002, 4003]
    assert log.tail(after=0, limit=1)[0].seq == 5000 - 4096 + 1, "only the newest are kept in memory"
    assert log.tail(after=5000) == log.tail(limit=0) == EventLog().tail() == ()


def test_a_full_disk_costs_the_file_alone() -> None:
    log = EventLog("/dev/full")
    assert len(log.append([CHANGE])) == len(log.append([CHANGE])) == 1
    assert len(log.tail()) == 2


def test_open_starts_are_those_without_an_end() -> None:
    log = EventLog()
    log.append(
        [
            CHANGE,
            Change(kind=EventKind.INSTANCE_START, span="instance:1.1"),
            Change(kind=EventKind.INSTANCE_READY, span="instance:0.1"),
            Change(kind=EventKind.INSTANCE_DRAIN_START, span="instance:0.1"),
        ]
    )
    assert [(e.kind, e.span) for e in open_starts(log.tail())] == [
        (EventKind.INSTANCE_START, "instance:1.1"),
        (EventKind.INSTANCE_DRAIN_START, "instance:0.1"),
    ]
