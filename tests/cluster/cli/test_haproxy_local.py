"""HAProxy of a local cluster has no open statistics, and ends with the process that began it."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from pengserve.cluster.cli.haproxy_local import without_open_ports, write_launcher

CONFIG = """global
    stats socket /tmp/x/admin.sock mode 666
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind *:8000
# frontend of nothing
listen stats
  bind *:8404
  stats enable
"""


def test_statistics_move_to_unix_sockets_and_the_api_stays_where_it_is():
    changed = without_open_ports(CONFIG, "/tmp/ps-1/node")
    assert "bind unix@/tmp/ps-1/node/promethe mode 600" in changed
    assert "bind unix@/tmp/ps-1/node/stats mode 600" in changed
    assert "bind *:8000" in changed
    assert without_open_ports(changed, "/tmp/ps-1/node") == changed
    assert changed.count("\n") == CONFIG.count("\n")


@pytest.mark.slow
def test_all_that_listens_in_serves_own_template_is_moved():
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    changed = without_open_ports(
        HAPROXY_CONFIG_TEMPLATE.replace("{{ config.metrics_port }}", "1").replace("{{ config.stats_port }}", "2"), "/d"
    )
    binds = [line.strip() for line in changed.splitlines() if line.strip().startswith("bind ")]
    assert [bind.split()[1] for bind in binds] == [
        "unix@/d/promethe",
        "{{",  # http_frontend: where the user said
        "{{",  # grpc_frontend: there is none without gRPC
        "unix@/d/stats",
    ], "Ray Serve's template has changed: mend cluster/cli/haproxy_local.py"


@pytest.fixture
def launcher(tmp_path):
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
        assert config.read_text() == without_open_ports(CONFIG, str(tmp_path))
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


def _until(is_so) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
