"""`status`, `top`, `events` and the error line, against a real HTTP server."""

import json
import socket

import pytest

from pengserve.cluster.cli.main import main
from pengserve.planners.types.codec import from_data, to_data
from pengserve.planners.types.events import Event
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState
from tests.cluster.client.cluster_server import ADMIN_KEY, ClusterState, cluster_server, instance, snapshot, some_events


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    """No address or key from the shell that runs the tests."""
    for name in ("PENGSERVE_URL", "PENGSERVE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def state():
    """A loaded instance and a starting one; two snapshots, two seconds apart."""
    before = instance(0, num_running=3, kv_blocks_used=50, total_generated_tokens=1000, total_prompt_tokens=400)
    now = instance(
        0,
        num_running=4,
        num_waiting=7,
        kv_blocks_used=50,
        queued_tokens=320,
        total_generated_tokens=1200,
        total_prompt_tokens=500,
        total_prefix_queries=200,
        total_prefix_predicted=60,
        total_prefix_hits=50,
    )
    starting = instance(1, InstanceState.STARTING)
    state = ClusterState(
        snapshots=[snapshot(before, starting), snapshot(now, starting, time_s=1002.0)], events=some_events(700)
    )
    with cluster_server(state):
        yield state


def run(state: ClusterState, *arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--url", state.url, "--admin-key", ADMIN_KEY])
    return end.value.code


def row_of(text: str, key: str) -> str:
    return next(line for line in text.splitlines() if line.split()[:1] == [key])


def test_status_shows_each_instance(state, capsys):
    state.snapshots.pop(0)
    assert run(state, "status") == 0
    text = capsys.readouterr().out
    row = row_of(text, "0.0")
    for cell in ("ready", "dp", "127.0.0.1", "cpu", "1000", "1,600 / 3,200", "4", "7", "500", "1,200"):
        assert cell in row, (cell, row)
    assert "starting" in row_of(text, "1.0")
    assert "1/2 ready" in text


def test_status_as_json_is_the_snapshot(state, capsys):
    wanted = state.snapshots[0]
    assert run(state, "status", "--json") == 0
    assert from_data(ClusterSnapshot, json.loads(capsys.readouterr().out)) == wanted


def test_top_shows_rates_bars_and_totals(state, capsys):
    assert run(state, "top", "--once", "--interval", "0.1") == 0
    text = capsys.readouterr().out
    row = row_of(text, "0.0")
    assert "██████████▒▒" in row, row  # 50 of 100 blocks resident, 10 blocks of queued demand, 20 cells
    assert "50% of 3,200" in row
    assert "20.0 MiB + 6.2 MiB" in row
    assert row.split()[-2:] == ["50", "100"]  # tokens per second in and out, over two seconds
    assert "output 100 tok/s" in text
    assert "prefix hits 25% (predicted 30%)" in text


def test_top_never_compares_two_lives_of_a_slot(state, capsys):
    reborn = instance(0, incarnation=1, total_generated_tokens=5)
    state.snapshots[-1] = snapshot(reborn, time_s=1002.0)
    assert run(state, "top", "--once", "--interval", "0.1") == 0
    row = row_of(capsys.readouterr().out, "0.1")
    assert row.split()[-2:] == ["-", "-"]


def test_events_pages_through_all_of_them(state, capsys):
    assert run(state, "events", "--json", "--after", "10") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [from_data(Event, json.loads(line)) for line in lines] == state.events[10:]


def test_events_for_people_name_kind_span_and_reason(state, capsys):
    assert run(state, "events", "--after", "699") == 0
    (line,) = capsys.readouterr().out.splitlines()
    event = state.events[-1]
    assert all(part in line for part in (str(event.seq), event.kind.value, event.span, event.why))
    assert to_data(event)["kind"] == event.kind.value


@pytest.mark.parametrize("command", [["status"], ["top", "--once"], ["events"]])
def test_nobody_there_is_one_line_on_stderr_and_exit_code_1(command, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(SystemExit) as end:
        main([*command, "--url", url])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (1, "")
    assert err == f"pengserve: cannot connect to {url}: is `pengserve up` running there?\n"


def test_a_wrong_key_is_one_line_that_says_which_key(state, capsys):
    with pytest.raises(SystemExit) as end:
        main(["status", "--url", state.url, "--admin-key", "nope"])
    err = capsys.readouterr().err
    assert end.value.code == 1
    assert "admin key" in err and err.count("\n") == 1 and "nope" not in err


def test_address_and_key_come_from_the_environment(state, monkeypatch, capsys):
    monkeypatch.setenv("PENGSERVE_URL", state.url)
    monkeypatch.setenv("PENGSERVE_ADMIN_KEY", ADMIN_KEY)
    with pytest.raises(SystemExit) as end:
        main(["status"])
    assert end.value.code == 0
    assert ADMIN_KEY not in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["statsu"], ["status", "--nope"], ["up", "--port", "0"], ["model", "make-demo"]])
def test_wrong_usage_is_exit_code_2(arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
