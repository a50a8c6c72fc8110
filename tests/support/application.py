"""A whole application, started as a user starts it: `pengserve up CONFIG`, found by its port, ended by its process."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from pengserve.client import PengServe
from pengserve.planners.types.snapshot import ClusterSnapshot, InstanceState
from tests.support.processes import ENGINE, OFFLINE

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 240.0


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Application:
    """`pengserve up` in a process of its own. Everything it starts are its descendants."""

    def __init__(
        self,
        model: Path,
        *,
        ingress_replicas: int = 1,
        num_instances: int = 2,
        model_name: str = "tiny",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`settings`: sections to add, or to put in place of those here."""
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model_name = model_name
        self._files = tempfile.TemporaryDirectory(prefix="pengserve-app-")
        config = {
            "model": str(model),
            "served_model_name": [self.model_name],
            "instances": {"count": num_instances, "device": "cpu"},
            "engine": dict(ENGINE),
            "http": {"port": self.port, "ingress_replicas": ingress_replicas},
            "shape": {"merge_below": 0},  # as deploy/laptop.yaml: load alone never merges
            # Tests kill instances for minutes; by default a slot that loses life after life waits up to a minute.
            "controller": {"restart_backoff_s": 0.1, "restart_backoff_max_s": 0.5},
            "openai": {"tool_call_parser": "hermes", "enable_auto_tool_choice": True},
            **(settings or {}),
        }
        path = Path(self._files.name) / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        self._log_path = Path(self._files.name) / "log"
        self._log = self._log_path.open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pengserve.cluster.cli.main", "up", str(path)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | OFFLINE,
        )
        self.client = PengServe(self.url)

    def log(self) -> str:
        """What `pengserve up` has printed."""
        return self._log_path.read_text()

    def ingress_log(self) -> str:
        """What its ingresses have logged, as Serve keeps it."""
        raylet = psutil.Process(self.pid_of("raylet/raylet"))
        (socket_name,) = [part for part in raylet.cmdline() if part.startswith("--raylet_socket_name=")]
        session = Path(socket_name.partition("=")[2]).parent.parent
        return "\n".join(path.read_text() for path in session.glob("logs/serve/replica_*Ingress*.log"))

    def wait_ready(self, num_ready: int = 2, timeout_s: float = START_TIMEOUT_S) -> ClusterSnapshot:
        """Waits until `num_ready` instances are ready."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, f"pengserve up ended:\n{self.log()[-4000:]}"
            snapshot = self.snapshot()
            if snapshot is not None and len(ready(snapshot)) >= num_ready:
                return snapshot
            time.sleep(0.1)
        raise AssertionError(f"{num_ready} instances were not ready in {timeout_s:g} s:\n{self.log()[-4000:]}")

    def snapshot(self) -> ClusterSnapshot | None:
        """The cluster now, or None where no server answers yet."""
        from pengserve.client import PengServeError

        try:
            return self.client.status()
        except PengServeError:
            return None

    def pid_of(self, title: str) -> int:
        """Process id of the one descendant whose title contains `title`."""
        found = self.pids_of(title)
        assert len(found) == 1, f"{len(found)} processes are called {title!r}"
        return found[0]

    def pids_of(self, title: str) -> list[int]:
        """Process ids of the descendants whose title contains `title`."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if title in " ".join(child.cmdline()):
                    found.append(child.pid)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def stop(self) -> int:
        """Ctrl-C; the exit code of `pengserve up`. Where that has ended already, its log tells why."""
        if self.process.poll() is not None:
            raise AssertionError(f"pengserve up ended with {self.process.returncode}:\n{self.log()[-4000:]}")
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        finally:
            for process in (self.process, *descendants):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            self.client.close()
            self._log.close()
            self._files.cleanup()


def ready(snapshot: ClusterSnapshot) -> list[int]:
    """Process ids of the instances that are ready."""
    return [i.device.pid for i in snapshot.instances if i.state is InstanceState.READY]


def kill(pid: int) -> None:
    """SIGKILL; a process that is gone already is no error."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
