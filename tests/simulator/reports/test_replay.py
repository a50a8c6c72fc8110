"""Laws of the real run that a report shows beside simulated ones: what its logs say, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from pengserve.controller.layout import changed
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.errors import ConfigError
from pengserve.planners.types.events import Event, EventKind
from pengserve.planners.types.ids import Epoch
from pengserve.planners.types.layout import Layout, parse_groups
from pengserve.simulator.replay import Logged, is_request_log, read_events, read_request_log, real_result
from pengserve.simulator.reports.figures import figures_of
from pengserve.simulator.traces.loading import load

START_S = 1_795_263_698.0


def line(since_s: float, **changes: Any) -> dict[str, Any]:
    """A request that got its first token after 1 s and the last of 11 after 3 s."""
    given: dict[str, Any] = {
        "at_s": START_S + since_s,
        "prompt_tokens": 100,
        "output_tokens": 11,
        "priority": 0,
        "degree": None,
        "ttft_s": 1.0,
        "e2e_s": 3.0,
        "finish": "stop",
        "instance": "1.0",
        "losses": 0,
    }
    return {**given, **changes}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def layout_event(seq: int, at_s: float, groups: str) -> Event:
    """As the controller writes it."""
    change = changed(Layout(epoch=Epoch(seq), groups=parse_groups(groups)), "")
    return Event(seq=seq, time_s=START_S + at_s, kind=change.kind, data=change.data)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rows = [line(4.0), line(0.0), line(2.0, finish="abort", output_tokens=5), line(3.0, output_tokens=0, ttft_s=None)]
    return write(tmp_path / "requests.jsonl", rows)


def test_the_real_run_and_the_replayed_trace_are_the_same_requests(log: Path) -> None:
    real, replayed = real_result(read_request_log(log)), load(log)
    assert [o.arrived_s for o in real.outcomes] == [a.at_s for a in replayed] == [0.0, 2.0, 4.0]
    assert [o.output_tokens for o in real.outcomes] == [a.output_tokens for a in replayed]


def test_times_are_those_that_clients_saw(log: Path) -> None:
    figures = figures_of(real_result(read_request_log(log)))
    assert figures.ttft_s is not None and figures.ttft_s.maximum == pytest.approx(1.0)
    assert figures.tpot_s is not None and figures.tpot_s.p50 == pytest.approx(0.2)
    assert (figures.num_finished, figures.num_unfinished, figures.num_refused) == (2, 1, 0)


def test_what_no_log_tells_is_left_out(log: Path) -> None:
    figures = figures_of(real_result(read_request_log(log)))
    assert (figures.tbt_s, figures.queue_s, figures.longest_gap_s, figures.kv_use_mean) == (None, None, None, None)


def test_requests_in_flight_and_their_tokens_are_counted_at_each_moment(tmp_path: Path) -> None:
    rows = read_request_log(write(tmp_path / "log", [line(0.0), line(0.5)]))
    moments = {moment.at_s: moment for moment in real_result(rows).moments}
    assert (moments[0.75].num_running, moments[0.75].num_waiting, moments[0.75].demand_tokens) == (0, 2, 200)
    assert (moments[1.0].num_running, moments[1.0].used_tokens) == (1, 100)
    assert moments[2.0].used_tokens == round(100 + 11 / 2 + 100 + 11 / 4)
    assert (moments[3.0].num_running, moments[3.5].num_running) == (1, 0)
    assert sum(moment.generated_tokens for moment in moments.values()) == pytest.approx(22, abs=2)


def test_layouts_and_drop_periods_are_those_of_the_event_log(tmp_path: Path) -> None:
    events = [
        layout_event(1, -5.0, "dp@(0) dp@(1)"),
        layout_event(2, 1.1, "pp2@(0,1)"),
        layout_event(3, 2.6, "dp@(0) dp@(1)"),
    ]
    path = write(tmp_path / "events", [to_data(event) for event in [events[1], events[0], events[2]]])
    real = real_result(read_request_log(write(tmp_path / "log", [line(0.0)])), read_events(path))
    (period,) = figures_of(real).drops
    assert period == (pytest.approx(1.1, abs=1e-4), pytest.approx(2.6, abs=1e-4))
    assert real.num_instances == 2 and real.moments[0].groups == "dp@(0) dp@(1)"
    assert [(event.seq, round(event.time_s, 3)) for event in real.events] == [(1, -5.0), (2, 1.1), (3, 2.6)]


def test_a_layout_of_very_many_groups_is_read_as_far_as_it_was_written() -> None:
    many = " ".join(f"dp@({i})" for i in range(200))
    event = layout_event(1, 0.0, many)
    assert "more" in str(event.data["groups"])
    rows = (read_row(line(1.0)),)
    assert real_result(rows, [event]).moments[0].groups.startswith("dp@(0) dp@(1)")


def read_row(data: dict[str, Any]) -> Logged:
    fields = ("at_s", "prompt_tokens", "output_tokens", "priority", "ttft_s", "e2e_s", "finish", "instance")
    return Logged(**{name: data[name] for name in fields})


def test_a_window_is_cut_as_traces_are(log: Path) -> None:
    real = real_result(read_request_log(log), window=(1.0, 4.5))
    assert [o.arrived_s for o in real.outcomes] == [1.0, 3.0]
    with pytest.raises(ConfigError, match=r"no request of the log arrives in \[50, 60\)"):
        real_result(read_request_log(log), window=(50.0, 60.0))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ([1], "row 2: not a JSON object"),
        (line(0.0, output_tokens="x"), "row 2: field output_tokens must be a number"),
        (line(0.0, at_s=None), "row 2: field at_s must be a number"),
        (line(0.0, ttft_s=-1), "row 2: field ttft_s must be a number"),
    ],
)
def test_a_bad_row_is_named_with_its_field(tmp_path: Path, row: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_request_log(write(tmp_path / "log", [line(0.0), row]))


def test_a_bad_event_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"row 1: Event\.seq is missing"):
        read_events(write(tmp_path / "events", [{"kind": "layout_changed"}]))
    bad = Event(seq=7, time_s=START_S, kind=EventKind.LAYOUT_CHANGED, data={"groups": "tp9@(0)"})
    with pytest.raises(ConfigError, match="event 7 of the event log"):
        real_result((read_row(line(0.0)),), [bad])


def test_a_request_log_is_told_from_other_traces(tmp_path: Path, log: Path) -> None:
    (tmp_path / "azure.csv").write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n")
    assert is_request_log(log)
    assert not is_request_log(tmp_path / "azure.csv")
    assert not is_request_log(tmp_path / "nowhere")
    assert not is_request_log(write(tmp_path / "other", [{"at_s": 1, "prompt_tokens": 1, "output_tokens": 1}]))
