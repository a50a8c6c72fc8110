"""The arena of a device."""

import torch

from pengserve.planners.types.errors import ConfigError
from pengserve.replicas.memory.arena.arena import Arena
from pengserve.replicas.memory.arena.backend import Backend
from pengserve.replicas.memory.arena.cpu import CpuBackend
from pengserve.replicas.memory.arena.cuda import CudaBackend


def open_arena(device: torch.device, num_bytes: int, chunk_bytes: int) -> Arena:
    """`num_bytes` of `device`'s memory, in chunks.

    Raises:
        ConfigError: the device has no arena or not the memory, or the sizes do not suit it.
    """
    return Arena(backend_of(device), num_bytes, chunk_bytes)


def backend_of(device: torch.device) -> Backend:
    """What remaps a device's memory; it has none yet.

    Raises:
        ConfigError: nothing does.
    """
    if device.type == "cpu":
        return CpuBackend()
    if device.type == "cuda":
        return CudaBackend(device)
    raise ConfigError(f"device {device} has no arena: choose cpu or cuda")
