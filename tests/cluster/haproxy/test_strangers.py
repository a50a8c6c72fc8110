"""Strangers at the HTTP port: half-open connections, slow senders, slow readers. With HAProxy as Serve configures it.

All connections stay on loopback; 127.0.0.2 plays a source that is not trusted.
"""

import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pengserve.cluster.haproxy.launcher import find_haproxy, write_launcher
from pengserve.cluster.haproxy.limits import ConnectionLimits

pytestmark = pytest.mark.slow  # imports Ray Serve, waits for time-outs

LIMITS = ConnectionLimits(
    header_timeout_s=3, client_timeout_s=3, max_connections_per_source=50, trusted_sources=("127.0.0.1/32",)
)
NUM_HALF_OPEN = 4150
FILES_NEEDED = 12_000  # for that many connections in HAProxy
ANSWER_WITHIN_S = 1.0
CLOSED_WITHIN_S = 30.0  # a slow machine closes thousands of connections late
STREAM_BYTES = 1 << 30
BUFFERED_BYTES = 64 << 20  # what the kernel and HAProxy may hold of it


class Backend(BaseHTTPRequestHandler):
    """An ingress as HAProxy sees it: a short answer, or a stream of a gigabyte."""

    protocol_version = "HTTP/1.1"
    sent_bytes = 0
    broke_off = threading.Event()
    is_gone = threading.Event()  # it fails its health checks

    def do_GET(self) -> None:
        """Any path but `/stream` is answered at once."""
        is_stream = self.path == "/stream"
        self.send_response(503 if Backend.is_gone.is_set() and self.path == "/-/healthz" else 200)
        self.send_header("Content-Length", str(STREAM_BYTES if is_stream else 2))
        self.end_headers()
        if not is_stream:
            self.wfile.write(b"ok")
            return
        try:
            for _ in range(STREAM_BYTES >> 16):
                self.wfile.write(bytes(1 << 16))
                Backend.sent_bytes += 1 << 16
        except OSError:
            Backend.broke_off.set()
            self.close_connection = True

    def log_message(self, *arguments: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Where HAProxy listens, with Serve's own configuration and one backend."""
    binary = find_haproxy()
    if binary is None:
        pytest.skip("no HAProxy")
    directory = tmp_path_factory.mktemp("ha")
    backend = ThreadingHTTPServer(("127.0.0.1", 0), Backend)
    backend.daemon_threads = True
    threading.Thread(target=backend.serve_forever, daemon=True).start()
    listening = _free_port()
    config = serve_config(directory, listening, backend.server_address[1])
    process = subprocess.Popen(
        [write_launcher(str(directory), binary), "-db", "-f", str(config)],
        env=os.environ | LIMITS.to_environment(),
        stdout=(directory / "log").open("w"),
        stderr=subprocess.STDOUT,
    )
    try:
        _until(lambda: _is_answered(listening) or process.poll() is not None, 60)
        assert process.poll() is None, (directory / "log").read_text()
        yield listening
    finally:
        process.kill()
        process.wait()
        backend.shutdown()
        backend.server_close()


def serve_config(directory: Path, listening: int, backend: int) -> Path:
    """The file that Ray Serve writes for one application."""
    haproxy = pytest.importorskip("ray.serve._private.haproxy")
    from ray.serve.config import HTTPOptions

    path = directory / "haproxy.cfg"
    config = haproxy.HAProxyConfig(
        socket_path=str(directory / "admin.sock"),
        server_state_base=str(directory),
        server_state_file=str(directory / "state"),
        metrics_socket_path=str(directory / "metrics.sock"),
        http_options=HTTPOptions(host="127.0.0.1", port=listening),
        nbthread=1,
    )
    application = haproxy.BackendConfig(
        name="http-app",
        path_prefix="/",
        app_name="app",
        servers=[haproxy.ServerConfig(name="ingress", host="127.0.0.1", port=backend)],
    )
    api = haproxy.HAProxyApi(cfg=config, backend_configs={"http-app": application}, config_file_path=str(path))
    api._generate_config_file_internal()
    return path


def test_thousands_of_half_open_connections_keep_no_client_waiting(port: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES_NEEDED:
        pytest.skip(f"the system opens {hard} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES_NEEDED), hard))
    with contextlib.ExitStack() as opened:
        half_open = [opened.enter_context(_connection(port)) for _ in range(NUM_HALF_OPEN)]
        for _ in range(20):
            began_s = time.monotonic()
            assert _is_answered(port, timeout_s=10 * ANSWER_WITHIN_S)
            assert time.monotonic() - began_s < ANSWER_WITHIN_S
            time.sleep(0.05)
        _until(lambda: _num_open(half_open) == 0, CLOSED_WITHIN_S)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_header_byte_a_second_is_cut_off(port: int) -> None:
    with _connection(port) as slow:
        began_s = time.monotonic()
        slow.settimeout(1.0)
        answer = b""
        for byte in b"GET /v1/models HTTP/1.1\r\nX-Slow: yes, very much so\r\n":
            try:
                slow.send(bytes([byte]))
                answer += slow.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            if answer:
                break
        assert LIMITS.header_timeout_s - 0.5 < time.monotonic() - began_s < CLOSED_WITHIN_S
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_one_source_cannot_take_the_connections_of_others(port: int) -> None:
    with contextlib.ExitStack() as opened:
        taken = []
        for _ in range(80):
            with contextlib.suppress(ConnectionResetError):  # one too many may be closed before `connect` returns
                taken.append(opened.enter_context(_connection(port, source="127.0.0.2")))
        _until(lambda: _num_open(taken) == LIMITS.max_connections_per_source, CLOSED_WITHIN_S)
        assert _is_answered(port)


def test_a_client_that_never_reads_is_cut_off_and_fills_no_memory(port: int) -> None:
    with _connection(port) as client:
        client.send(b"GET /stream HTTP/1.1\r\nHost: here\r\n\r\n")
        assert Backend.broke_off.wait(CLOSED_WITHIN_S + LIMITS.client_timeout_s)
    assert 0 < Backend.sent_bytes < BUFFERED_BYTES


def test_without_an_ingress_the_error_has_the_form_of_all_others(port: int) -> None:
    Backend.is_gone.set()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    _until(lambda: _status(port) == 503, CLOSED_WITHIN_S)
    connection.request("GET", "/v1/models")
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
    assert json.loads(answer.read())["error"]["type"] == "ServiceUnavailableError"
    connection.close()


def _connection(port: int, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(source, 0))


def _num_open(connections: list[socket.socket]) -> int:
    """How many of them the other side has not closed."""
    num_open = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            num_open += bool(connection.recv(4096))
        except BlockingIOError:
            num_open += 1
        except OSError:
            continue
    return num_open


def _is_answered(port: int, timeout_s: float = 10.0) -> bool:
    return _status(port, timeout_s) == 200


def _status(port: int, timeout_s: float = 10.0) -> int:
    """Status of an answer; 0 where there was none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


def _until(is_so, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
