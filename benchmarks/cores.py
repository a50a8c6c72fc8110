"""Which core an instance has, where instances must be compared: one for its whole life, as it would have a GPU.

The kernel alone moves processes about. With more instances than cores it then favours some servers over others: of four
of vLLM's under equal load, two have been seen to do two and a half times the work of the others.
"""

import os
from collections.abc import Iterable

import psutil

# What computes in a server of vLLM's, the first of these that it has: a worker process a stage, or its engine.
_VLLM_NAMES = ("VLLM::Worker", "VLLM::Engine")


def pin(instances: Iterable[int]) -> None:
    """Gives these processes, in their order, the cores in turn; two or more share one where there are too few.

    Threads that a process starts later inherit its core from the thread that starts them.
    """
    cores = sorted(os.sched_getaffinity(0))
    for index, pid in enumerate(instances):
        for thread in psutil.Process(pid).threads():
            os.sched_setaffinity(thread.id, {cores[index % len(cores)]})


def vllm_instances(server: int) -> list[int]:
    """Process ids of what computes for the server with this one, in the order of their ranks.

    Raises:
        LookupError: none is found.
    """
    children = psutil.Process(server).children(recursive=True)
    for name in _VLLM_NAMES:
        found = [child.pid for child in sorted(children, key=psutil.Process.name) if child.name().startswith(name)]
        if found:
            return found
    raise LookupError(f"server {server} has no process whose name begins with any of {', '.join(_VLLM_NAMES)}")
