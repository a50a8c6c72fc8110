"""Instances keep to the cores that they are given, and those of vLLM's servers are found."""

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.cores import pin, vllm_instances

pytest.importorskip("setproctitle", reason="vLLM names its processes with it")

# A server whose children have vLLM's names, and a second thread each.
CHILD = "import threading, setproctitle, sys; setproctitle.setproctitle(sys.argv[1]);"
CHILD += "threading.Thread(target=sys.stdin.read, daemon=True).start(); print(flush=True); threading.Event().wait(60)"
SERVER = (
    "import subprocess, sys;"
    f"children = [subprocess.Popen([sys.executable, '-c', {CHILD!r}, name], stdout=-1) for name in sys.argv[1:]];"
    "[child.stdout.readline() for child in children]; print(flush=True); sys.stdin.read();"
    "[child.kill() for child in children]; [child.wait() for child in children]"
)


def serve(*names: str) -> subprocess.Popen[bytes]:
    """A server that has started children of these names."""
    command = [sys.executable, "-c", SERVER, *names]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdout is not None
    server.stdout.readline()
    return server


@pytest.fixture
def stages() -> Iterator[subprocess.Popen[bytes]]:
    """A server of a pipeline of three, which began in another order."""
    server = serve("VLLM::Worker_PP2", "VLLM::EngineCore", "VLLM::Worker_PP0", "VLLM::Worker_PP1")
    yield server
    server.communicate(timeout=30)


def test_stages_are_found_in_their_order_and_each_thread_keeps_to_a_core(stages: subprocess.Popen[bytes]) -> None:
    found = vllm_instances(stages.pid)
    assert [psutil.Process(pid).name() for pid in found] == [f"VLLM::Worker_PP{rank}" for rank in range(3)]
    cores = sorted(os.sched_getaffinity(0))
    pin(found)
    for rank, pid in enumerate(found):
        threads = psutil.Process(pid).threads()
        assert len(threads) > 1
        assert {frozenset(os.sched_getaffinity(thread.id)) for thread in threads} == {
            frozenset({cores[rank % len(cores)]})
        }
    assert sorted(os.sched_getaffinity(stages.pid)) == cores, "the server itself may run anywhere"


def test_an_engine_that_computes_itself_is_found() -> None:
    server = serve("VLLM::EngineCore", "another")
    assert [psutil.Process(pid).name() for pid in vllm_instances(server.pid)] == ["VLLM::EngineCore"]
    server.communicate(timeout=30)


def test_a_server_without_either_is_named() -> None:
    with pytest.raises(LookupError, match=f"server {os.getpid()} has no process"):
        vllm_instances(os.getpid())
