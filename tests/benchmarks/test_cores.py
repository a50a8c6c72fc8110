"""Instances keep to the cores that they are given, and vLLM's engines are found."""

import os
import subprocess
import sys

import psutil
import pytest

from benchmarks.cores import engine_of, pin

pytest.importorskip("setproctitle", reason="vLLM names its processes with it")

# A server with children of these names, that have a second thread each.
CHILD = "import threading, setproctitle, sys; setproctitle.setproctitle(sys.argv[1]);"
CHILD += "threading.Thread(target=sys.stdin.read, daemon=True).start(); print(flush=True); threading.Event().wait(60)"
SERVER = (
    "import subprocess, sys;"
    f"command = [sys.executable, '-c', {CHILD!r}];"
    "children = [subprocess.Popen([*command, name], stdin=-1, stdout=-1) for name in sys.argv[1:]];"
    "[child.stdout.readline() for child in children]; print(flush=True); sys.stdin.read();"
    "[child.kill() for child in children]; [child.wait() for child in children]"
)


def serve(*names: str) -> subprocess.Popen[bytes]:
    """A server that has started children of these names; it ends with the block it is the context of."""
    command = [sys.executable, "-c", SERVER, *names]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    return server


def test_engines_are_found_and_each_of_their_threads_keeps_to_a_core() -> None:
    names = ("another", "VLLM::EngineCore")
    with serve(*names) as first, serve(*names) as second, serve(*names) as third:
        servers = [first.pid, second.pid, third.pid]
        found = list(map(engine_of, servers))
        assert [psutil.Process(pid).name() for pid in found] == 3 * ["VLLM::EngineCore"]
        assert [psutil.Process(pid).ppid() for pid in found] == servers
        cores = sorted(os.sched_getaffinity(0))
        pin(found)
        taken = []
        for pid in found:
            threads = psutil.Process(pid).threads()
            assert len(threads) > 1
            own = {core for thread in threads for core in os.sched_getaffinity(thread.id)}
            assert len(own) == 1
            taken += own
        assert taken == sorted(taken)
        assert set(taken) == set(cores[: len(found)])
        for server in servers:
            assert sorted(os.sched_getaffinity(server)) == cores, "the server itself may run anywhere"


def test_a_server_without_an_engine_is_named() -> None:
    with pytest.raises(LookupError, match=f"server {os.getpid()} has no process"):
        engine_of(os.getpid())
