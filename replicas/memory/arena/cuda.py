"""Physical memory of a GPU instance: one allocation handle per chunk, mapped by the driver.

    reserve   cuMemAddressReserve
    map       cuMemMap for each chunk, then one cuMemSetAccess for all
    wait      cuCtxSynchronize: kernels of any stream may use the memory
    unmap     one cuMemUnmap: a range may span handles, if it ends where they end

Kernels that are launched later, and replays of graphs that were captured before, see what is mapped then. The driver's
documentation says so, and an H200 does so (benchmarks/results/gpu-h200.md).
"""

from collections.abc import Sequence
from typing import Any

import torch

from pengserve.planners.types.errors import ConfigError, EngineError, StepError
from pengserve.planners.types.units import format_bytes


class CudaBackend:
    """Chunks of one GPU's memory, through `cuda-bindings`."""

    def __init__(self, device: torch.device) -> None:
        """Asks the device what it can; takes nothing yet.

        Raises:
            ConfigError: `cuda-bindings` or the driver is missing, or the device cannot remap memory.
        """
        self._driver = _load_bindings()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)  # with its index, torch does not ask the driver about an address
        self._handles: list[Any] = []
        self._chunk_bytes = 0
        try:
            self._load_driver()
            ordinal = self._call("cuDeviceGet", index)
            self._context = self._call("cuDevicePrimaryCtxRetain", ordinal)
            self._properties, self._access = self._describe(ordinal, index)
            minimum = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            self.granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, minimum))
        except StepError as error:
            raise ConfigError(f"{self._device} cannot have an arena: {error}") from error

    def create(self, num_chunks: int, chunk_bytes: int) -> None:
        """Creates one handle per chunk. Raises ConfigError, and keeps none of these, where the GPU has too little."""
        self._enter()
        self._chunk_bytes, num_before = chunk_bytes, len(self._handles)
        try:
            for _ in range(num_chunks):
                self._handles.append(self._call("cuMemCreate", chunk_bytes, self._properties, 0))
        except StepError as error:
            num_got = len(self._handles) - num_before
            wanted, got = (format_bytes(num * chunk_bytes) for num in (num_chunks, num_got))
            self._release(num_before)
            raise ConfigError(f"the arena wants {wanted} of {self._device} and got {got}: {error}") from error

    def reserve(self, num_bytes: int) -> int:
        """The address of a new empty range. Raises StepError where the driver refuses."""
        self._enter()
        return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def map(self, address: int, chunks: Sequence[int]) -> int:
        """Maps `chunks`, in order, from `address` on; the number of calls.

        Raises:
            StepError: the driver refused; nothing changed.
            EngineError: the driver refused, and then refused to unmap what was mapped.
        """
        self._enter()
        size, num_mapped = self._chunk_bytes, 0
        try:
            for chunk in chunks:
                self._call("cuMemMap", address + num_mapped * size, size, 0, self._handles[chunk], 0)
                num_mapped += 1
            self._call("cuMemSetAccess", address, num_mapped * size, [self._access], 1)
        except StepError as error:
            try:
                if num_mapped:
                    self.unmap(address, num_mapped)
            except StepError as second:
                raise EngineError(
                    f"mapping {len(chunks)} chunks failed ({error}) and the rollback failed too ({second});"
                    " restart this instance"
                ) from error
            raise
        return len(chunks) + 1

    def wait(self) -> None:
        """Waits for all streams of the device's context. Raises StepError where a kernel has failed."""
        self._enter()
        self._call("cuCtxSynchronize")

    def unmap(self, address: int, num_chunks: int) -> int:
        """Takes away what is behind the range, which stays reserved; one call. Raises StepError as `map` does."""
        self._enter()
        self._call("cuMemUnmap", address, num_chunks * self._chunk_bytes)
        return 1

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        """The range as bytes on the device, `[num_bytes]`, without touching them. The tensor keeps `owner` alive."""
        return torch.as_tensor(_DeviceBytes(address, num_bytes, owner), device=self._device)

    def release(self) -> None:
        """Gives all handles back to the driver. Idempotent; nothing is mapped any more."""
        self._enter()
        self._release(0)

    def _release(self, num_kept: int) -> None:
        while len(self._handles) > num_kept:
            self._call("cuMemRelease", self._handles.pop())

    def free(self, address: int, num_bytes: int) -> None:
        """Gives an address range of `reserve` back; nothing is mapped in it."""
        self._enter()
        self._call("cuMemAddressFree", address, num_bytes)

    def _load_driver(self) -> None:
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # the bindings look for libcuda when it is called first
            raise StepError(f"NVIDIA's driver does not load: {error}") from error

    def _describe(self, ordinal: Any, index: int) -> tuple[Any, Any]:
        """The kind of memory to allocate, and the access rights of this device to it."""
        driver = self._driver
        can = driver.CUdevice_attribute
        if not self._call("cuDeviceGetAttribute", can.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, ordinal):
            raise ConfigError(f"{self._device} cannot remap its memory")
        wanted = driver.CUmemAllocationProp()
        wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = index
        rdma = can.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        if self._call("cuDeviceGetAttribute", rdma, ordinal):
            wanted.allocFlags.gpuDirectRDMACapable = 1  # or network cards cannot read KV in place
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return wanted, access

    def _enter(self) -> None:
        """Gives a thread without a context the device's primary one, which torch uses too; others keep theirs."""
        if not int(self._call("cuCtxGetCurrent")):
            self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *results = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise StepError(f"{name} failed: {getattr(status, 'name', status)}")
        return results[0] if results else None


class _DeviceBytes:
    """What torch takes for an array of device memory. The tensor made of it holds it, and so `owner`."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def _load_bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ConfigError("an arena on CUDA needs cuda-bindings: pip install cuda-bindings") from error
    return driver
