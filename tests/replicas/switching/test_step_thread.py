"""Law: what waits for a time comes in the order in which it is due, and all of it waits in one thread."""

import queue
import threading
import time
from collections.abc import Callable

import pytest

from pengserve.replicas.switching import step_thread
from pengserve.replicas.switching.step_thread import StepThread

TIMEOUT_S = 20.0


def waiting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "waits of the step thread"]


def test_works_come_when_they_are_due_from_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_thread, "IDLE_S", 0.05)
    submitted: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    steps, before = StepThread(submitted.put, TIMEOUT_S), len(waiting_threads())
    began_s = time.monotonic()
    for delay_s, what in ((0.2, "third"), (0.1, "second"), (60.0, "never"), (0.0, "first")):
        steps.after(delay_s, lambda what=what: what)
    assert len(waiting_threads()) == before + 1
    found = [submitted.get(timeout=TIMEOUT_S)() for _ in range(3)]
    assert found == ["first", "second", "third"]
    assert time.monotonic() - began_s >= 0.2
    assert submitted.empty()


def test_the_thread_ends_where_nothing_is_left_and_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_thread, "IDLE_S", 0.05)
    submitted: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    steps, before = StepThread(submitted.put, TIMEOUT_S), set(waiting_threads())
    for _ in range(2):
        steps.after(0.0, lambda: "due")
        assert submitted.get(timeout=TIMEOUT_S)() == "due"
        for thread in set(waiting_threads()) - before:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
