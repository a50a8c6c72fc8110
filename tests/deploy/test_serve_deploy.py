"""`ray start --head`, `serve deploy deploy/serve-cpu.yaml`, an answer, and everything gone again. As a user would.

With keys in files, and with HAProxy as the recipe says.
"""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from pengserve.cluster.cli.ports import PortBlock, port_block
from pengserve.cluster.cli.ray_local import ray_environment
from pengserve.cluster.settings_sources import parse_settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
MARK = "PYTEST_RAY_HEAD"  # inherited by every process of this Ray, to find those that stay behind
LEASE_S = 3.0
KEY, ADMIN_KEY = "api-key-of-the-tests", "admin-key-of-the-tests"
START_TIMEOUT_S, READY_TIMEOUT_S, STOP_TIMEOUT_S = 300.0, 900.0, 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A Ray head of its own: loopback, free ports, token authentication."""

    document: Path  # deploy/serve-cpu.yaml with a free HTTP port
    url: str
    dashboard: str
    environment: dict[str, str]
    mark: str
    haproxy: Path  # the folder of its configuration

    def instances(self) -> list[int]:
        """Process ids of the instances that live in this Ray."""
        return [pid for pid in _marked(self.mark) if b"ray::InstanceActor" in _command(pid)]

    def run(self, *command: str, timeout_s: float = 400) -> str:
        """Output of a command of the environment's `bin`; fails the test where it fails."""
        done = subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def block() -> Iterator[PortBlock]:
    """Ports of this Ray's Serve."""
    with port_block() as ports:
        yield ports


@pytest.fixture(scope="module")
def head(block: PortBlock) -> Iterator[Head]:
    scratch = Path(tempfile.mkdtemp(prefix="ps-", dir="/tmp"))  # Unix sockets take paths of 107 bytes at most
    ports = dict(zip(("gcs", "dashboard", "http", "agent", "client", "metrics"), _free_ports(6), strict=True))
    document = yaml.safe_load((ROOT / "deploy" / "serve-cpu.yaml").read_text())
    args = document["applications"][0]["args"]
    document["http_options"]["port"] = args["http"]["port"] = ports["http"]
    args.setdefault("instances", {})["lease_s"] = LEASE_S
    for name, key in (("api", KEY), ("admin", ADMIN_KEY)):
        (scratch / name).write_text(f"{key}\n")
    args["security"] = {"api_keys_file": str(scratch / "api"), "admin_key_file": str(scratch / "admin")}
    (scratch / "serve.yaml").write_text(yaml.safe_dump(document))
    mark = secrets.token_hex(8)
    environment = {
        **os.environ,
        **ray_environment(parse_settings(args), str(scratch), block),
        MARK: mark,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(BIN / "pengserve-haproxy"),
        "RAY_ADDRESS": f"127.0.0.1:{ports['gcs']}",
    }
    with (scratch / "ray.log").open("w") as log:
        ray = subprocess.Popen(
            [
                *(str(BIN / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=4"),
                *(f"--port={ports['gcs']}", f"--temp-dir={scratch}/ray", "--object-store-memory=134217728"),
                *("--dashboard-host=127.0.0.1", f"--dashboard-port={ports['dashboard']}", "--disable-usage-stats"),
                *(f"--dashboard-agent-listen-port={ports['agent']}", f"--ray-client-server-port={ports['client']}"),
                f"--metrics-export-port={ports['metrics']}",
            ],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    dashboard = f"http://127.0.0.1:{ports['dashboard']}"
    try:
        _await(lambda: _is_up(f"{dashboard}/api/version", environment["RAY_AUTH_TOKEN"]), START_TIMEOUT_S, ray, scratch)
        yield Head(
            document=scratch / "serve.yaml",
            url=f"http://127.0.0.1:{ports['http']}",
            dashboard=dashboard,
            environment=environment,
            mark=mark,
            haproxy=scratch,
        )
    finally:
        _stop(ray, mark)
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.shapes
def test_a_redeploy_with_another_configuration_rolls_over_and_loses_no_answer(head: Head) -> None:
    head.run("serve", "deploy", "--address", head.dashboard, str(head.document))
    _await(lambda: _is_up(f"{head.url}/ready"), READY_TIMEOUT_S)
    _await(lambda: len(head.instances()) == 2, READY_TIMEOUT_S)
    old = set(head.instances())
    ends: list[str] = []
    over = threading.Event()
    clients = [threading.Thread(target=_ask_on_and_on, args=(head.url, over, ends)) for _ in range(3)]
    for client in clients:
        client.start()
    document = yaml.safe_load(head.document.read_text())
    document["applications"][0]["args"]["engine"]["max_num_seqs"] = 32
    changed = head.document.with_name("changed.yaml")
    changed.write_text(yaml.safe_dump(document))
    try:
        head.run("serve", "deploy", "--address", head.dashboard, str(changed))
        _await(lambda: not old & set(head.instances()), READY_TIMEOUT_S)
        _await(lambda: _is_up(f"{head.url}/ready"), READY_TIMEOUT_S)
        _await(lambda: len(head.instances()) == 2, READY_TIMEOUT_S)
        num_before = len(ends)
        _await(lambda: len(ends) > num_before + 3, READY_TIMEOUT_S)
    finally:
        over.set()
        for client in clients:
            client.join(STOP_TIMEOUT_S)
    assert set(ends) == {"[DONE]"}, "every answer came whole, from one configuration"
    head.run("serve", "shutdown", "--yes", "--address", head.dashboard)
    _await(lambda: not head.instances(), STOP_TIMEOUT_S)


def _ask_on_and_on(url: str, over: threading.Event, ends: list[str]) -> None:
    """Streams one answer after the other; notes the last line of each, or what went wrong."""
    body = {"model": "demo", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "What does json.dumps do?"}]
    headers = {"Authorization": f"Bearer {KEY}"}
    while not over.is_set():
        try:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=400) as answer:
                lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
            is_whole = any('"finish_reason":"length"' in line for line in lines)
            ends.append(lines[-1] if answer.status_code == 200 and is_whole else f"{answer.status_code} {lines}")
        except httpx.HTTPError as error:
            ends.append(repr(error))


def test_serve_deploy_answers_and_shuts_down(head: Head) -> None:
    head.run("serve", "deploy", "--address", head.dashboard, str(head.document))
    _await(lambda: _is_up(f"{head.url}/ready"), READY_TIMEOUT_S)
    answer = httpx.post(
        f"{head.url}/v1/chat/completions",
        json={"model": "demo", "max_tokens": 32, "messages": [{"role": "user", "content": "What does json.dumps do?"}]},
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"].strip()
    status = yaml.safe_load(head.run("serve", "status", "--address", head.dashboard))
    assert status["applications"]["pengserve"]["status"] == "RUNNING"
    assert len(head.instances()) == 2
    check_that_keys_are_hidden(head)
    check_that_haproxy_is_guarded(head)
    head.run("pengserve", "down", "--app", "another", "--url", head.url)
    assert _is_up(f"{head.url}/ready"), "it drained an application of another name"
    # Nobody drains here. The instances are detached actors: their leases end, and they find their application gone.
    head.run("serve", "shutdown", "--yes", "--address", head.dashboard)
    _await(lambda: not _is_up(f"{head.url}/live"), STOP_TIMEOUT_S)
    _await(lambda: not head.instances(), STOP_TIMEOUT_S)


def check_that_keys_are_hidden(head: Head) -> None:
    """Nowhere that Ray and Serve show what runs."""
    token = {"Authorization": f"Bearer {head.environment['RAY_AUTH_TOKEN']}"}
    shown = [
        head.run("serve", "status", "--address", head.dashboard),
        head.run("serve", "config", "--address", head.dashboard),
        *(
            httpx.get(f"{head.dashboard}/api/{path}", headers=token, timeout=60).text
            for path in ("serve/applications/", "v0/actors?detail=true", "jobs/")
        ),
    ]
    assert "api_keys_file" in shown[1] and "api_keys_file" in shown[2]
    assert not any(key in text for key in (KEY, ADMIN_KEY) for text in shown)
    assert httpx.get(f"{head.url}/cluster/status", headers={"x-pengserve-admin-key": ADMIN_KEY}).status_code == 200
    for path in ("/v1/models", "/cluster/status", "/metrics"):
        assert httpx.get(f"{head.url}{path}", timeout=60).status_code == 401


def check_that_haproxy_is_guarded(head: Head) -> None:
    """A half-open connection ends within the time for headers; statistics have no port."""
    (config,) = head.haproxy.rglob("haproxy.cfg")
    text = config.read_text()
    assert "timeout http-request 10s" in text and "sc0_conn_cur gt 2048" in text
    assert not re.search(r"bind (:|\*:)", text)
    with socket.create_connection(("127.0.0.1", httpx.URL(head.url).port), timeout=60) as half_open:
        half_open.sendall(b"GET /v1/models HTTP/1.1\r\n")
        assert half_open.recv(4096).startswith(b"HTTP/1.1 408")


def test_the_dashboard_wants_the_token(head: Head) -> None:
    refused = httpx.get(f"{head.dashboard}/api/serve/applications/", timeout=30)
    assert refused.status_code in (401, 403)


def _is_up(url: str, token: str = "") -> bool:
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return httpx.get(url, headers=headers, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _await(condition, timeout_s: float, process: subprocess.Popen | None = None, scratch: Path | None = None) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        ended = process is not None and process.poll() is not None
        if ended or time.monotonic() > deadline_s:
            log = (scratch / "ray.log").read_text()[-2000:] if scratch is not None else ""
            pytest.fail(f"{'the process ended' if ended else f'not so after {timeout_s:g} s'}: {log}")
        time.sleep(0.3)


def _stop(ray: subprocess.Popen, mark: str) -> None:
    """SIGTERM to `ray start --block`, which stops its processes; then whatever carries our mark and still lives."""
    ray.terminate()
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    while (left := _marked(mark)) and time.monotonic() < deadline_s:
        ray.poll()
        time.sleep(0.2)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    ray.wait(10)


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended, or it is somebody else's
    return found


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has ended


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()
