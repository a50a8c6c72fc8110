"""Which core an instance has, where instances must be compared: one for its whole life, as it would have a GPU.

The kernel alone moves processes about. With more instances than cores it then favours some servers over others, though
all have as much to do.
"""

import os
from collections.abc import Iterable
from itertools import cycle

import psutil

_VLLM_ENGINE = "VLLM::EngineCore"  # how vLLM names the process


def pin(instances: Iterable[int]) -> None:
    """Gives these processes, in their order, the cores in turn, then again from the last to the first, and so on.

    Where two or more share a core, neighbours do not meet on it, nor do leaders of pipelines, who have most to do.
    Threads that a process starts later inherit its core from the thread that starts them.
    """
    cores = sorted(os.sched_getaffinity(0))
    there_and_back = cycle([*cores, *reversed(cores)])
    for pid, core in zip(instances, there_and_back, strict=False):
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
