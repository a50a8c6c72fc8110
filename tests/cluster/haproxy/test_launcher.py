"""What Ray Serve runs in HAProxy's place becomes HAProxy, and ends with the process that started it."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pengserve.cluster.haproxy.config import guarded
from pengserve.cluster.haproxy.launcher import (
    MAX_CONNECTIONS,
    find_haproxy,
    max_connections,
    proxy_remarks,
    write_launcher,
)
from pengserve.cluster.haproxy.limits import ConnectionLimits
from pengserve.cluster.haproxy.pages import write_error_pages

CONFIG = """global
    maxconn 4096
defaults
    timeout client 3600s
frontend http_frontend
    bind *:8000
"""


@pytest.fixture
def launcher(tmp_path: Path) -> str:
    """A launcher over a stand-in for HAProxy that tells its arguments and sleeps."""
    haproxy = tmp_path / "real"
    haproxy.write_text('#!/bin/sh\necho "$$ $*" > "$(dirname "$0")/told"\nexec sleep 600\n')
    haproxy.chmod(0o700)
    return write_launcher(str(tmp_path), str(haproxy))


def test_serve_finds_haproxy_under_the_process_it_began_and_with_its_arguments(launcher, tmp_path):
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    process = subprocess.Popen([launcher, "-db", "-f", str(config), "-dR"])
    try:
        _until(lambda: (tmp_path / "told").exists() and (tmp_path / "told").read_text().endswith("\n"))
        assert (tmp_path / "told").read_text().split() == [str(process.pid), "-db", "-f", str(config), "-dR"]
        limits = ConnectionLimits()
        most = max_connections({}, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        pages = write_error_pages(str(tmp_path))
        assert config.read_text() == guarded(CONFIG, str(tmp_path), limits, max_connections=most, pages=pages)
    finally:
        process.kill()
        process.wait()


def test_haproxy_ends_when_the_process_that_began_it_is_killed(launcher, tmp_path):
    code = f"import subprocess, time; print(subprocess.Popen([{launcher!r}]).pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    _until(lambda: (tmp_path / "told").exists())
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    _until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def test_a_variable_that_cannot_be_read_is_named_and_haproxy_does_not_start(launcher, tmp_path):
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    environment = os.environ | {"PENGSERVE_HTTP__HEADER_TIMEOUT_S": "ten"}
    done = subprocess.run([launcher, "-f", str(config)], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "PENGSERVE_HTTP__HEADER_TIMEOUT_S: a whole number from 1 to 3600 is accepted, got 'ten'\n"
    assert not (tmp_path / "told").exists()


def test_an_unknown_configuration_is_refused_in_one_sentence(launcher, tmp_path):
    config = tmp_path / "haproxy.cfg"
    config.write_text("global\n    maxconn 10\n")
    done = subprocess.run([launcher, "-f", str(config)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "install the Ray version" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "told").exists()


def test_connections_fit_the_files_that_may_be_open():
    assert max_connections({}, 1_048_576) == MAX_CONNECTIONS
    assert max_connections({}, resource.RLIM_INFINITY) == MAX_CONNECTIONS
    assert max_connections({}, 4096) == 1558
    assert max_connections({"RAY_SERVE_HAPROXY_MAXCONN": "100"}, 4096) is None


def test_a_ray_that_runs_haproxy_as_it_comes_is_told(tmp_path):
    assert "half-open" in " ".join(proxy_remarks({"RAY_SERVE_ENABLE_HA_PROXY": "1"}))
    for environment in (
        {},
        {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_BINARY_PATH": "/venv/bin/pengserve-haproxy"},
        {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_HAPROXY_BINARY_PATH": write_launcher(str(tmp_path), "/x")},
    ):
        assert proxy_remarks(environment) == []


def test_the_command_of_the_recipes_runs_the_haproxy_that_came_with_serve():
    if find_haproxy() is None:
        pytest.skip("no HAProxy")
    command = Path(sys.executable).with_name("pengserve-haproxy")
    environment = os.environ | {"RAY_SERVE_HAPROXY_BINARY_PATH": str(command)}  # as Serve has it
    told = subprocess.run(
        [command, "-v"], env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert told.startswith("HAProxy version")


def _until(is_so) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
