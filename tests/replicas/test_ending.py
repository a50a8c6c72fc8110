"""Law: once its lease has ended an instance's process exits with all its children, also where a part of it hangs."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pengserve.replicas.ending import GentleEnd, LeaseWatch, answer_within
from pengserve.replicas.lease import Lease

WAIT_S = 60.0


class Scene:
    """An instance whose parts do as a test says; the exit is noted instead of done."""

    def __init__(self, **parts: Any) -> None:
        self.done: list[str] = []
        self.statuses: list[int] = []
        self.exited = threading.Event()
        self.parts = parts

    def retire(self, timeout_s: float) -> bool:
        self._do("retire")
        return True

    def leave(self, timeout_s: float) -> bool:
        self._do("leave")
        return True

    def stop(self) -> None:
        self._do("stop")

    def release(self) -> None:
        self._do("release")

    def exit(self, status: int) -> None:
        self.statuses.append(status)
        self.exited.set()

    def watch(self, lease: Any = None) -> None:
        silent = Lease(0.01, now=time.monotonic, application_exists=lambda: False)
        LeaseWatch(lease or silent, self.end()).start()
        assert self.exited.wait(WAIT_S)

    def end(self) -> GentleEnd:
        return GentleEnd(
            self,
            drain_timeout_s=0.05,
            release=self.release,
            exit_process=self.exit,
            exit_margin_s=0.05,
            linger_s=0.0,
        )

    def _do(self, name: str) -> None:
        self.done.append(name)
        self.parts.get(name, lambda: None)()


def fail() -> None:
    raise RuntimeError("a fault of ours")


def hang() -> None:
    time.sleep(WAIT_S)


def test_an_instance_finishes_ends_and_frees_its_place() -> None:
    scene = Scene()
    scene.watch()
    assert scene.done == ["retire", "stop", "release"] and scene.statuses[0] == 0


@pytest.mark.parametrize("part", ["retire", "stop", "release"])
def test_a_part_that_fails_does_not_keep_the_process(part: str) -> None:
    scene = Scene(**{part: fail})
    scene.watch()
    assert scene.done == ["retire", "stop", "release"] and scene.statuses[0] == 0


@pytest.mark.parametrize("part", ["retire", "stop", "release"])
def test_a_part_that_hangs_does_not_keep_the_process(part: str) -> None:
    scene = Scene(**{part: hang})
    scene.watch()
    assert scene.done[-1] == part and scene.statuses == [1]


def test_sigterm_makes_it_leave_once() -> None:
    scene, before = Scene(), signal.getsignal(signal.SIGTERM)
    try:
        scene.end().on_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert scene.exited.wait(WAIT_S)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    time.sleep(0.1)
    assert scene.done == ["leave", "stop", "release"] and scene.statuses[0] == 0


def test_a_question_that_fails_is_asked_again() -> None:
    class Failing(Lease):
        calls = 0

        def ended(self) -> bool:
            Failing.calls += 1
            if Failing.calls < 3:
                raise RuntimeError("a fault of ours")
            return True

    Scene().watch(Failing(0.01, now=time.monotonic, application_exists=lambda: True))
    assert Failing.calls == 3


def test_a_question_has_an_end() -> None:
    assert answer_within(0.05, lambda: time.sleep(WAIT_S)) is None
    assert answer_within(WAIT_S, fail) is None
    assert answer_within(WAIT_S, lambda: 7) == 7


def test_a_process_whose_step_hangs_exits_with_its_children() -> None:
    code = """
import signal, subprocess, sys, threading, time
from pengserve.replicas.ending import GentleEnd, LeaseWatch
from pengserve.replicas.lease import Lease

class Hanging:
    def retire(self, timeout_s):
        threading.Event().wait()
    leave = retire
    def stop(self):
        threading.Event().wait()

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print(child.pid, flush=True)
lease = Lease(0.01, now=time.monotonic, application_exists=lambda: False)
LeaseWatch(lease, GentleEnd(Hanging(), drain_timeout_s=0.1, release=lambda: None, exit_margin_s=0.1)).start()
threading.Event().wait()  # the step
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert process.wait(WAIT_S) == 1
        deadline_s = time.monotonic() + WAIT_S
        while is_running(child):
            assert time.monotonic() < deadline_s, "its child is left"
            time.sleep(0.02)
    finally:
        process.kill()


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
