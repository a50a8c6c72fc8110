"""The event log: numbers that go on, lines that a crash tears, and ends for all starts."""

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pengserve.controller import line_file
from pengserve.controller.events import RETRY_S, TAIL_BYTES, EventDraft, EventLog, open_starts
from pengserve.controller.line_file import FileLimits
from pengserve.planners.types.events import EventKind

CHANGE = EventDraft(kind=EventKind.INSTANCE_START, span="instance:0.1", why="begin", data={"n": 1})


def test_numbers_go_on_over_restarts(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "events.jsonl")
    for expected in (1, 3, 5):
        log = EventLog(path)
        assert [event.seq for event in log.append([CHANGE, CHANGE])] == [expected, expected + 1]
        log.close()
    assert [event.seq for event in EventLog(path).tail()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("torn", [b'{"seq":3,"time_s":1.5,"ki', b"\xff\xfe", b"{}", b"[1]", b"7", b"[" * 10_000])
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
    EventLog(str(path)).append([EventDraft(kind=EventKind.INSTANCE_ERROR, why="x" * 1000)] * 1200)
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


class Disk:
    """Stands for `os.write`: takes so many bytes a call, and so many in all."""

    def __init__(self, *, free: int = 1 << 30, a_call: int = 1 << 30) -> None:
        self.free, self.a_call = free, a_call

    def write(self, file: int, data: memoryview) -> int:
        num_bytes = min(self.free, self.a_call, len(data))
        if not num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.free -= num_bytes
        return os.write(file, data[:num_bytes])


def test_a_controller_begins_and_goes_on_while_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, takes back what it had begun to write, and writes again once there is room."""
    path, disk, now_s = tmp_path / "events.jsonl", Disk(), [0.0]

    def open_log() -> EventLog:
        return EventLog(str(path), write=disk.write, clock=lambda: now_s[0])

    open_log().append([CHANGE])
    disk.free = 20  # of a line of about a hundred bytes
    log = open_log()
    for _ in range(5):
        log.append([CHANGE])
        now_s[0] += RETRY_S
    assert [event.seq for event in log.tail()] == [1, 2, 3, 4, 5, 6]
    assert [json.loads(line)["seq"] for line in path.read_bytes().splitlines()] == [1]
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
    disk.free = 1 << 30
    log.append([CHANGE])
    assert "5 events are missing" in caplog.text
    assert [event.seq for event in open_log().tail()] == [1, 7]


def test_a_controller_begins_where_the_file_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    for path in (tmp_path, Path("/proc/no/such/file"), tmp_path / "a file" / "below"):
        assert EventLog(str(path)).append([CHANGE])[0].seq == 1


def test_short_writes_are_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(str(path), write=Disk(a_call=7).write).append([CHANGE, CHANGE])
    assert [event.seq for event in EventLog(str(path)).tail()] == [1, 2]


def test_old_events_make_room_for_new_ones(tmp_path: Path) -> None:
    """Files are bounded in size and number, and a new controller reads over their borders."""
    path, limits = tmp_path / "events.jsonl", FileLimits(max_bytes=1000, num_older=2)
    log = EventLog(str(path), limits=limits)
    for _ in range(40):
        log.append([CHANGE])
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert sizes.keys() == {"events.jsonl", "events.jsonl.1", "events.jsonl.2"} and max(sizes.values()) <= 1000
    found = [event.seq for event in EventLog(str(path), limits=limits).tail()]
    assert found == list(range(found[0], 41)) and len(found) > 14
    assert EventLog(str(path), limits=limits).append([CHANGE])[0].seq == 41


def test_two_writers_of_one_file_tear_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two controllers that overlap, on a disk that takes a line in pieces, while the files rotate."""
    monkeypatch.setattr(line_file, "_LOCK_TRIES", 60_000)  # the machine may be slow
    path, limits = tmp_path / "events.jsonl", FileLimits(max_bytes=1500, num_older=30)
    logs = [EventLog(str(path), limits=limits, write=Disk(a_call=30).write) for _ in range(2)]

    def write(log: EventLog) -> None:
        for _ in range(60):
            log.append([CHANGE])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, logs))
    lines = [line for file in tmp_path.iterdir() for line in file.read_bytes().splitlines()]
    assert sorted(json.loads(line)["seq"] for line in lines) == sorted(2 * list(range(1, 61)))


def test_open_starts_are_those_without_an_end() -> None:
    log = EventLog()
    log.append(
        [
            CHANGE,
            EventDraft(kind=EventKind.INSTANCE_START, span="instance:1.1"),
            EventDraft(kind=EventKind.INSTANCE_READY, span="instance:0.1"),
            EventDraft(kind=EventKind.INSTANCE_DRAIN_START, span="instance:0.1"),
        ]
    )
    assert [(e.kind, e.span) for e in open_starts(log.tail())] == [
        (EventKind.INSTANCE_START, "instance:1.1"),
        (EventKind.INSTANCE_DRAIN_START, "instance:0.1"),
    ]
