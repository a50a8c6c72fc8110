"""Signals to `pengserve up`, alone or to its group, and what is left after each end: over a stand-in for the server."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pengserve.cluster.cli import scratch as scratch_module
from pengserve.cluster.cli.scratch import MARK, RECORD, Scratch, remove_leftovers
from pengserve.cluster.cli.supervisor import Repeats, StopRequest
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(180)  # what a stand-in tells is read without a time-out of its own

# Tells what it does as lines; has a helper in a session of its own, as HAProxy or a worker might be.
SERVER = """
import os, subprocess, sys, time
from pengserve.cluster.cli import supervisor
supervisor.PATIENCE_S = 0.2

def serve(scratch, stop):
    helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("serving", os.getpid(), helper.pid, scratch.directory, scratch.temporary, flush=True)
    try:
        while not stop.wait(0.05):
            pass
        print("draining", flush=True)
        time.sleep(float(sys.argv[1]))
    except KeyboardInterrupt:
        print("at once", flush=True)
        return 130
    return 0

sys.exit(supervisor.supervise(serve))
"""


class Up:
    """A supervised stand-in, as the leader of a process group."""

    def __init__(self, drain_s: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(drain_s)], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[0] == "serving"
        self.child, self.helper = int(words[1]), int(words[2])
        self.directory, self.temporary = Path(words[3]), Path(words[4])

    def line(self) -> str:
        """The next line it tells."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int, to_group: bool) -> None:
        """Sends a signal to the supervisor, or to its whole group."""
        (os.killpg if to_group else os.kill)(self.process.pid, number)

    def ended(self) -> int:
        """The exit code, when it has ended."""
        return self.process.wait(60)

    def leaves_nothing(self) -> bool:
        """Whether neither a process nor a directory of it is left."""
        living = [pid for pid in (self.child, self.helper) if _lives(pid)]
        return not living and not self.directory.exists() and not self.temporary.exists()


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def up() -> Iterator[Callable[..., Up]]:
    """Starts stand-ins, and ends them after the test."""
    started: list[Up] = []

    def start(drain_s: float = 0.0) -> Up:
        started.append(Up(drain_s))
        return started[-1]

    yield start
    for one in started:
        for pid in (one.process.pid, one.child, one.helper):
            if _lives(pid):
                os.kill(pid, signal.SIGKILL)
        one.process.wait()
        assert one.process.stdout is not None
        one.process.stdout.close()


@pytest.mark.parametrize("to_group", [False, True], ids=["process", "group"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_one_signal_drains_and_leaves_nothing(up, number, to_group):
    running = up()
    running.signal(number, to_group)
    assert running.line() == "draining"
    assert running.ended() == 0
    assert running.leaves_nothing()


@pytest.mark.parametrize("to_group", [False, True], ids=["process", "group"])
def test_a_second_signal_stops_at_once_and_leaves_nothing(up, to_group):
    running = up(drain_s=600)
    running.signal(signal.SIGTERM, to_group)
    assert running.line() == "draining"
    running.signal(signal.SIGINT, to_group)
    assert running.line() == "at once"
    assert running.ended() == 130
    assert running.leaves_nothing()


def test_timeouts_two_signals_are_one(up):
    running = up(drain_s=1)
    running.signal(signal.SIGTERM, to_group=False)
    running.signal(signal.SIGTERM, to_group=True)
    assert running.line() == "draining"
    assert running.ended() == 0


def test_a_supervisor_that_is_killed_leaves_a_server_that_drains_and_clears_up(up):
    running = up()
    os.kill(running.process.pid, signal.SIGKILL)
    assert running.line() == "draining"
    until(running.leaves_nothing, timeout_s=60)


def test_a_server_that_is_killed_is_told_and_cleared_up(up):
    running = up()
    os.kill(running.child, signal.SIGKILL)
    assert running.ended() == 1
    assert running.leaves_nothing()


def test_what_a_killed_cluster_left_goes_with_the_next_start_and_nothing_else(up):
    killed, living = up(), up()
    os.kill(killed.child, signal.SIGSTOP)  # so that it does not clear up by itself
    os.kill(killed.process.pid, signal.SIGKILL)
    os.kill(killed.child, signal.SIGKILL)
    killed.process.wait()
    until(lambda: not _lives(killed.child), timeout_s=60)
    assert _lives(killed.helper) and killed.directory.exists()
    bystander = subprocess.Popen(["sleep", "600"], env={**os.environ, MARK: "another"})
    try:
        assert remove_leftovers() >= 1
        until(killed.leaves_nothing, timeout_s=60)
        assert _lives(living.child) and _lives(living.helper) and living.directory.exists()
        assert _lives(bystander.pid)
    finally:
        bystander.kill()
        bystander.wait()


@pytest.fixture
def parent(monkeypatch) -> Iterator[Path]:
    """A directory in which all scratch directories are."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        monkeypatch.setattr(scratch_module, "PARENT", Path(name))
        yield Path(name)


@pytest.mark.parametrize(
    "changed",
    [{}, {"started": ""}, {"pid": 1}, {"mark": ""}, {"temporary": "/usr"}, {"pid": "x"}],
    ids=["living owner", "other start", "other process", "no mark", "another's directory", "broken"],
)
def test_a_directory_is_removed_only_where_its_owner_is_provably_gone(parent, changed):
    scratch = Scratch.create()
    try:
        path = Path(scratch.directory, RECORD)
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        is_gone = changed in ({"started": ""}, {"pid": 1})
        assert remove_leftovers() == (1 if is_gone else 0)
        assert Path(scratch.directory).exists() != is_gone
    finally:
        scratch.remove()


def test_a_directory_without_a_record_is_left_alone(parent):
    (parent / "ps-other").mkdir()
    assert remove_leftovers() == 0 and (parent / "ps-other").exists()


def test_a_signal_is_a_repeat_only_at_once_and_only_of_itself():
    now_s = [0.0]
    repeats = Repeats(lambda: now_s[0])
    assert not repeats.is_one(signal.SIGTERM)
    assert repeats.is_one(signal.SIGTERM)
    assert not repeats.is_one(signal.SIGINT)
    now_s[0] = 10.0
    assert not repeats.is_one(signal.SIGTERM)


def test_nohup_is_respected():
    kept = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest().listening():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, kept)


def test_an_insisting_signal_comes_once(monkeypatch):
    stop = StopRequest()
    with stop.listening():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGUSR1)  # while everything is stopped: no second one
        time.sleep(0.05)
    assert stop.is_asked
