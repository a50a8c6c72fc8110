"""`pengserve layout` against a real HTTP server whose layouts and events a test sets."""

import json

import pytest

from pengserve.cluster.cli.main import main
from pengserve.planners.types.codec import from_data
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.snapshot import LayoutView
from tests.cluster.client.cluster_server import ADMIN_KEY, ClusterState, cluster_server, layout_view, some_events

ALONE, PAIR = "dp@(0) dp@(1)", "tp2@(0,1)"
WHAT = "merge tp2@(0,1) (carry)"


@pytest.fixture
def state(monkeypatch):
    """A server with events of an earlier life."""
    for name in ("PENGSERVE_URL", "PENGSERVE_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    with cluster_server(ClusterState(layouts=[layout_view(ALONE)], events=some_events(30))) as state:
        yield state


def run(state: ClusterState, *arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["layout", *arguments, "--url", state.url, "--admin-key", ADMIN_KEY])
    return end.value.code


def happens_after(state: ClusterState, kind: EventKind, why: str = "", **data) -> None:
    """Adds an event that comes with the next look at the layout, after what was there before."""
    event = Event(seq=31, time_s=2000.0, kind=kind, why=why, span="switch:m", data={"what": WHAT, **data})
    first = state.layouts[0]

    class Layouts(list):
        def pop(self, index: int = -1):
            state.events.append(event)
            return super().pop(index)

    state.layouts = Layouts([first, *state.layouts[1:]])


def test_layout_alone_shows_it(state, capsys):
    assert run(state) == 0
    assert "can form" in capsys.readouterr().out


def test_layout_as_json_is_the_view(state, capsys):
    assert run(state, "--json") == 0
    assert from_data(LayoutView, json.loads(capsys.readouterr().out)) == state.layouts[0]


def test_set_waits_shows_the_phases_and_prints_the_layout(state, capsys):
    state.layouts = [layout_view(ALONE, PAIR), layout_view(PAIR, PAIR, epoch=4)]
    happens_after(state, EventKind.TRANSITION_END, meet_s=0.0031, cutover_s=0.0082, num_carried=2, carried_bytes=2048)
    assert run(state, "set", "tp2", "--strategy", "hard") == 0
    out, err = capsys.readouterr()
    assert state.layouts_asked == [{"layout": "tp2", "strategy": "hard"}]
    assert f"{WHAT} meet 3.1 ms, cutover 8.2 ms; 2 carried (2.0 KiB)" in err
    assert "reason" not in err  # switches of before are no business of this one
    assert out == "layout tp2@(0,1)   epoch 4   pinned to tp2@(0,1)\n"


def test_set_that_does_not_come_about_is_exit_code_1_and_says_why(state, capsys):
    state.layouts = [layout_view(ALONE, PAIR), layout_view(ALONE, PAIR)]
    happens_after(state, EventKind.TRANSITION_ERROR, why="a member is busy")
    assert run(state, "set", "tp2", "--timeout", "0.3") == 1
    err = capsys.readouterr().err
    assert f"no such layout after 0.3 s ({WHAT} failed: a member is busy)" in err


def test_set_without_waiting_returns_at_once(state, capsys):
    state.layouts = [layout_view(ALONE, PAIR)]
    assert run(state, "set", "tp2", "--no-wait") == 0
    assert capsys.readouterr().out == "layout 2 dp   epoch 3   pinned to tp2@(0,1)\n"


def test_an_impossible_layout_is_one_line_on_stderr(state, capsys):
    assert run(state, "set", "tp9") == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", "pengserve: tp9 is not possible here: choose dp (HTTP 400)\n")


def test_auto_hands_over_to_the_planner(state, capsys):
    assert run(state, "auto") == 0
    assert state.layouts_asked == [{"layout": "auto"}]
    assert capsys.readouterr().out.endswith("auto\n")


def test_an_unknown_strategy_is_wrong_usage(state):
    assert run(state, "set", "tp2", "--strategy", "quick") == 2
