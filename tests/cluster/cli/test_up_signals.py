"""A signal ends a real `pengserve up` clean at any moment: no process, port, directory or temporary file is left."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.application import free_port
from tests.support.processes import ENGINE, OFFLINE
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

MARK = "UP_SIGNALS_RUN"  # in the environment of every process that the command starts
START_TIMEOUT_S, STOP_TIMEOUT_S = 400.0, 200.0


class Up:
    """`pengserve up` of one instance, as the leader of a process group, with a TMPDIR of its own."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.mark = secrets.token_hex(8)
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        config = {
            "model": str(model),
            "served_model_name": ["tiny"],
            "instances": {"count": 1, "device": "cpu"},
            "engine": dict(ENGINE),
            "http": {"port": self.port},
        }
        path = directory / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        self._log = (directory / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pengserve.cluster.cli.main", "up", str(path)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | OFFLINE | {MARK: self.mark, "TMPDIR": str(self.temporary), "RAY_TMPDIR": "/tmp"},
            start_new_session=True,
        )

    def log(self) -> str:
        """What it has printed."""
        return Path(self._log.name).read_text()

    def reaches(self, text: str) -> None:
        """Waits until it has printed `text`."""

        def has_come() -> bool:
            assert self.process.poll() is None, self.log()[-4000:]
            return text in self.log()

        until(has_come, timeout_s=START_TIMEOUT_S, period_s=0.02)

    def signal(self, number: int, to_group: bool) -> None:
        """Sends a signal to the command, or to its whole group."""
        (os.killpg if to_group else os.kill)(self.process.pid, number)

    def scratch(self) -> list[str]:
        """Its directories in /tmp: those with an owner's record of it."""
        found = []
        for path in Path("/tmp").glob("ps-*/owner.json"):
            with contextlib.suppress(OSError):
                if str(self.temporary) in path.read_text():
                    found.append(str(path.parent))
        return found

    def processes(self) -> dict[int, str]:
        """Living processes that it started, and itself."""
        wanted = f"{MARK}={self.mark}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
        return found

    def clear(self) -> None:
        """Kills what is left."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


@pytest.fixture
def up(model: Path) -> Iterator[Up]:
    directory = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # short: sockets are made below it
    running = Up(model, directory)
    yield running
    running.clear()
    shutil.rmtree(directory, ignore_errors=True)


MOMENTS = ("before Ray", "deploying", "ready", "draining")
# What the others differ in is told apart by the tests of the supervisor, without a cluster.
USUAL = {("deploying", signal.SIGHUP), ("draining", signal.SIGTERM)}
CASES = [
    pytest.param(moment, number, to_group, marks=() if is_usual else pytest.mark.faults)
    for moment in MOMENTS
    for to_group in (False, True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    for is_usual in [to_group and (moment, number) in USUAL]
]


@pytest.mark.parametrize(("moment", "number", "to_group"), CASES)
def test_a_signal_ends_it_clean(up: Up, moment: str, number: int, to_group: bool) -> None:
    words = {"before Ray": "importing and starting", "deploying": "starting Ray Serve"}
    up.reaches(words.get(moment, "Ready after"))
    if moment == "deploying":
        until(lambda: _is_listening(up.port), timeout_s=START_TIMEOUT_S, period_s=0.02)  # HAProxy is there
    answer = _answer(up) if moment == "draining" else None
    up.signal(number, to_group)
    if answer is not None:
        up.reaches("Draining")
        insisting = signal.SIGTERM if number == signal.SIGINT else signal.SIGINT  # the same one so soon would not count
        up.signal(insisting, to_group)
    code = up.process.wait(STOP_TIMEOUT_S)
    # A fast machine may have finished the answer before the second signal.
    assert code in ((130, 0) if moment == "draining" else (0,)), up.log()[-4000:]
    assert "Traceback" not in up.log()
    _leaves_nothing(up)


@pytest.mark.parametrize("to_group", [True, pytest.param(False, marks=pytest.mark.faults)])
def test_an_answer_that_runs_is_finished_first(up: Up, to_group: bool) -> None:
    up.reaches("Ready after")
    answer = _answer(up)
    up.signal(signal.SIGTERM, to_group)
    assert up.process.wait(STOP_TIMEOUT_S) == 0, up.log()[-4000:]
    answer.join(60)
    assert answer.text.endswith("[DONE]\n\n"), answer.text[-500:]
    _leaves_nothing(up)


class _Answer(threading.Thread):
    """A long answer that is read until its end, or until its connection breaks."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self._url = url

    def run(self) -> None:
        body = {"model": "tiny", "prompt": "one", "max_tokens": 900, "stream": True, "ignore_eos": True}
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=120, trust_env=False) as response,
        ):
            for text in response.iter_text():
                self.text += text


def _answer(up: Up) -> _Answer:
    answer = _Answer(up.url)
    answer.start()
    until(lambda: bool(answer.text), timeout_s=60)
    return answer


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _leaves_nothing(up: Up) -> None:
    assert not up.processes()
    assert not _is_listening(up.port)
    assert not up.scratch()
    # torch keeps what it has compiled.
    assert not [path for path in up.temporary.iterdir() if not path.name.startswith("torchinductor_")]
