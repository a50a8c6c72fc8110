"""`pengserve why`: the life of a request, from what its ingress and the controller have written."""

import json
from pathlib import Path
from typing import Any

import pytest

from pengserve.cluster.cli.main import main
from pengserve.cluster.cli.why import find, life
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.events import Event, EventKind

BEGAN_S = 1_795_263_698.5
ROW: dict[str, Any] = {
    "at_s": BEGAN_S,
    "prompt_tokens": 812,
    "output_tokens": 120,
    "ttft_s": 0.21,
    "e2e_s": 6.5,
    "finish": "length",
    "losses": 1,
    "request_id": "cmpl-3f2a9c-0",
    "life": "0.001 sent 1.1; 2.000 carried 0.1; 2.000 shape tp2 0.1; 4.000 lost 0.1; 4.020 resumed 1.1",
}
MERGE = {"what": "merge tp2@(0,1) (carry)", "cutover_s": 0.0082, "num_carried": 4, "carried_bytes": 1 << 20}


def event(seq: int, after_s: float, kind: EventKind, why: str = "", span: str = "", **data: Any) -> Event:
    return Event(seq=seq, time_s=BEGAN_S + after_s, kind=kind, why=why, span=span, data=data)


EVENTS = [
    event(1, -60.0, EventKind.TRANSITION_END, **MERGE),  # long before
    event(2, 1.9, EventKind.TRANSITION_START, "requests wait", what=MERGE["what"]),
    event(3, 2.0, EventKind.TRANSITION_END, **MERGE),
    event(4, 2.5, EventKind.TRANSITION_END, what="merge tp2@(2,3) (carry)"),  # of others
    event(5, 4.0, EventKind.INSTANCE_LOST, "killed", span="instance:0.1"),
    event(6, 4.1, EventKind.INSTANCE_LOST, "killed", span="instance:7.1"),
    event(7, 90.0, EventKind.INSTANCE_LOST, "killed", span="instance:1.1"),  # long after
]


def test_a_life_is_told_in_order_with_what_happened_around_it() -> None:
    told = [(step.after_s, step.what.split(";")[0], step.is_around) for step in life(ROW, EVENTS)]
    assert told == sorted(told, key=lambda step: step[0])
    assert [what for _, what, is_around in told if not is_around] == [
        "it came",
        "sent to 1.1",
        "its first token",
        "went on at 0.1 with its KV",
        "0.1 runs tp2 from here on",
        "0.1 was lost",
        "computed again at 1.1, from its prompt and the tokens that it had",
        "it ended: length",
    ]
    around = [what for _, what, is_around in told if is_around]
    assert len(around) == 3
    assert "merge tp2@(0,1) (carry) began" in around[0] and "8.2 ms" in around[1] and "killed" in around[2]


def test_a_request_is_found_by_the_id_that_its_client_knows() -> None:
    other = ROW | {"request_id": "cmpl-other-0"}
    second = ROW | {"request_id": "cmpl-3f2a9c-1"}
    assert list(find("3f2a9c", [ROW, other, second])) == [ROW, second]
    assert list(find("cmpl-3f2a9c", [ROW, other, second])) == [ROW, second]
    chat, child = ({"request_id": text} for text in ("chatcmpl-3f2a9c", "1_cmpl-3f2a9c-0"))
    assert list(find("3f2a9c", [chat, child])) == [chat, child]
    assert list(find("3f2a", [ROW, chat])) == list(find("f2a9c", [ROW])) == list(find(".*", [ROW])) == []


def test_a_line_of_an_older_version_is_told_as_far_as_it_goes() -> None:
    row = {name: value for name, value in ROW.items() if name not in ("life", "losses")}
    assert [step.what for step in life(row, EVENTS)] == ["it came", "its first token", "it ended: length"]
    for text in ("nonsense", "x sent 0.1", "1.0 sent", ";", "1.0 what else 0.1"):
        life(row | {"life": text}, EVENTS)


def test_the_command_reads_logs_that_were_rotated_and_torn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests, events = tmp_path / "requests.jsonl", tmp_path / "events.jsonl"
    requests.write_text('{"at_s": 1, "torn')
    Path(f"{requests}.1").write_text(json.dumps(ROW) + "\n")
    events.write_text("".join(json.dumps(to_data(one)) + "\n" for one in EVENTS))
    with pytest.raises(SystemExit) as ended:
        main(["why", "3f2a9c", "--request-log", str(requests), "--event-log", str(events)])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "812 prompt tokens" in told and "0.1 was lost" in told and "killed" in told


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["why", "x"], "request_log"),
        (["why", "x", "--request-log", "/none.jsonl"], "cannot be read"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 1 and expected in capsys.readouterr().err


def test_an_unknown_request_is_said_to_be_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    with pytest.raises(SystemExit):
        main(["why", "unknown", "--request-log", str(path), "--event-log", str(path)])
    assert "no request 'unknown'" in capsys.readouterr().err
