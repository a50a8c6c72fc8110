"""Which core an instance has, where instances must be compared: one for its whole life, as it would have a GPU.

The kernel alone moves processes about. With more instances than cores it then favours some servers over others, though
all have as much to do.
"""

import os
from collections.abc import Iterable

import psutil

_VLLM_ENGINE = "VLLM::EngineCore"  # how vLLM names the process


def pin(instances: Iterable[int]) -> None:
    """Shares the cores out among these processes, in their order: those that share one are neighbours.

    A pipeline whose members share a core works through one microbatch after the other on it, so that the core always
    has something to do. Threads that a process starts later inherit its core from the thread that starts them.
    """
    cores, pids = sorted(os.sched_getaffinity(0)), list(instances)
    for index, pid in enumerate(pids):
        core = cores[index * min(len(cores), len(pids)) // len(pids)]
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, {core})


def engine_of(server: int) -> int:
    """Process id of the engine of vLLM's server with this one.

    Raises:
        LookupError: it has none.
    """
    for child in psutil.Process(server).children(recursive=True):
        if child.name() == _VLLM_ENGINE:
            return child.pid
    raise LookupError(f"server {server} has no process named {_VLLM_ENGINE}")
