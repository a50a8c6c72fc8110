"""A process's controller always gets an answer, and what only a programmer can mend is in the log as well."""

import io
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from pengserve.planners.types.errors import StepError
from pengserve.replicas.host import ControlLines


def answer(error: Exception) -> dict[str, Any]:
    """What a controller hears when an instance's `status` raises this."""

    def status() -> None:
        raise error

    instance: Any = SimpleNamespace(status=status)
    answers = io.StringIO()
    lines = ControlLines(instance, answers, on_end=lambda: None)
    lines.serve(io.StringIO(json.dumps({"id": 7, "call": "status"}) + "\n"))
    lines._threads.shutdown()
    result: dict[str, Any] = json.loads(answers.getvalue())
    return result


def test_a_refusal_is_answered_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert answer(StepError("not now")) == {"id": 7, "error": {"type": "StepError", "message": "not now"}}
    assert caplog.records == []


def test_a_fault_is_answered_and_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert answer(KeyError("x"))["error"]["type"] == "KeyError"
    assert [record.exc_info is not None for record in caplog.records] == [True]
