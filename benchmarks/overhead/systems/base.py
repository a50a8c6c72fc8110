"""Starting, awaiting and stopping a server process."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.overhead.plan import Plan

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}


class System(Protocol):
    """One of the compared systems."""

    name: str
    notes: str  # what differs from the others, for the report

    def start(self, plan: Plan) -> list[str]:
        """Starts it and waits until it serves; base URLs, over which clients are spread evenly."""

    def stop(self) -> None:
        """Stops all that `start` started, also after a failed start."""


class StartError(Exception):
    """A server did not come up; the message has the end of its log."""


class ServerProcess:
    """One server in a process group of its own, its output in a log file."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT, **(environment or {})},
                # No session of its own: Linux shares cores out among sessions first (kernel.sched_autogroup_enabled),
                # and of two engines on one core one was then seen to stand still for seconds.
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wait_ready(self, url: str, give_up_s: float) -> None:
        """Returns once `GET url` answers 200.

        Raises:
            StartError: the process ended, or `give_up_s` (of `time.monotonic`) has passed.
        """
        self.wait_text(url, "", give_up_s)

    def wait_text(self, url: str, text: str, give_up_s: float) -> None:
        """Returns once `GET url` answers 200 with `text` in the body; raises as `wait_ready` does."""
        while time.monotonic() < give_up_s:
            if self._process.poll() is not None:
                raise StartError(f"{self.log.name}: exit code {self._process.returncode}\n{self.tail()}")
            try:
                with urllib.request.urlopen(url, timeout=2) as answer:
                    if text in answer.read().decode():
                        return
            except (urllib.error.URLError, OSError):
                pass  # not listening yet, or not ready
            time.sleep(0.25)
        raise StartError(f"{self.log.name}: {url} did not answer as expected in time\n{self.tail()}")

    def stop(self, timeout_s: float = 60.0) -> None:
        """Asks it to end, twice if need be, then kills what is left of its process group."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if self._process.poll() is None:
                self._process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout=timeout_s / 2)
        with contextlib.suppress(ProcessLookupError):  # everything has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=10)

    def tail(self, num_bytes: int = 3000) -> str:
        """The end of its log."""
        return self.log.read_bytes()[-num_bytes:].decode(errors="replace")


_given_ports: set[int] = set()


def free_port() -> int:
    """A TCP port of the loopback interface that is free, and that this process was not given before."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in _given_ports:
            _given_ports.add(port)
            return port
