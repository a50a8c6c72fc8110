"""How much of a processor an instance has: a GPU of its own, or its part of the machine's cores."""

import os

from pengserve.planners.types.config import InstanceConfig


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors_each(config: InstanceConfig, cores: int, num_instances: int) -> float:
    """Processors of an instance, 1 at most, where `num_instances` like it run on a machine of so many cores."""
    if config.device != "cpu":
        return 1.0
    return min(1.0, cores / (max(1, num_instances) * max(1, config.cpu_threads)))
