"""The two kinds of memory that the arena's laws are stated for: pages, and what CUDA's driver maps, over pages too."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from pengserve.planners.types.errors import StepError
from pengserve.replicas.memory.arena.arena import Arena, Region
from pengserve.replicas.memory.arena.backend import Backend
from pengserve.replicas.memory.arena.cpu import CpuBackend
from pengserve.replicas.memory.arena.cuda import CudaBackend
from tests.replicas.memory.arena.host_driver import GRANULARITY, HostDriver

PAGE = mmap.PAGESIZE


class Refusing:
    """A backend whose system answers the next calls of `map` and `unmap` by `answers`, and all later ones by yes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.granularity = backend.granularity
        self.create, self.reserve, self.tensor = backend.create, backend.reserve, backend.tensor
        self.release, self.free, self.wait = backend.release, backend.free, backend.wait
        self.answers: list[bool] = []

    def map(self, address: int, chunks: Sequence[int]) -> int:
        self._ask()
        return self._backend.map(address, chunks)

    def unmap(self, address: int, num_chunks: int) -> int:
        self._ask()
        return self._backend.unmap(address, num_chunks)

    def _ask(self) -> None:
        if self.answers and not self.answers.pop(0):
            raise StepError("the system said no")


class World(Protocol):
    """An arena, and a way to look at its memory past the arena's books."""

    arena: Arena
    backend: Refusing

    def write(self, region: Region, chunk: int, value: int) -> None: ...
    def read(self, region: Region, chunk: int) -> int: ...
    def mapped(self, region: Region) -> list[int]:
        """Chunks of `region` that the system says have memory."""


class CpuWorld:
    """Chunks of one page."""

    def __init__(self, num_chunks: int) -> None:
        self.backend = Refusing(CpuBackend())
        self.arena = Arena(self.backend, num_chunks * PAGE, PAGE)
        self._tensors: dict[str, torch.Tensor] = {}

    def _elements(self, region: Region) -> torch.Tensor:
        """Bound once, before anything is mapped."""
        return self._tensors.setdefault(region.name, region.tensor(torch.int64)).view(region.num_chunks, -1)

    def write(self, region: Region, chunk: int, value: int) -> None:
        self._elements(region)[chunk].fill_(value)

    def read(self, region: Region, chunk: int) -> int:
        values = self._elements(region)[chunk]
        assert (values == values[0]).all()
        return int(values[0])

    def mapped(self, region: Region) -> list[int]:
        return sorted(system_chunks(region, PAGE))


class CudaWorld:
    """The driver's calls, through `cuda-bindings`."""

    def __init__(self, num_chunks: int) -> None:
        self.driver = HostDriver(memory_bytes=num_chunks * GRANULARITY)
        self.backend = Refusing(CudaBackend(torch.device("cuda:0")))
        self.arena = Arena(self.backend, num_chunks * GRANULARITY, GRANULARITY)

    def write(self, region: Region, chunk: int, value: int) -> None:
        self.driver.write(region.address + chunk * GRANULARITY, value)

    def read(self, region: Region, chunk: int) -> int:
        return self.driver.read(region.address + chunk * GRANULARITY)

    def mapped(self, region: Region) -> list[int]:
        places = range(region.address, region.address + region.num_chunks * GRANULARITY, GRANULARITY)
        return [chunk for chunk, place in enumerate(places) if self.driver.handle(place)]


def system_chunks(region: Region, chunk_bytes: int) -> dict[int, int]:
    """Region chunk -> physical chunk, as the kernel has it in `/proc/self/maps`."""
    found: dict[int, int] = {}
    stop = region.address + region.num_chunks * chunk_bytes
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, _, *name = line.split(maxsplit=5)
        if name and name[0].startswith("/memfd:pengserve-arena"):
            first, last = (int(part, 16) for part in addresses.split("-"))
            for place in range(max(first, region.address), min(last, stop), chunk_bytes):
                found[(place - region.address) // chunk_bytes] = (int(offset, 16) + place - first) // chunk_bytes
    return found
