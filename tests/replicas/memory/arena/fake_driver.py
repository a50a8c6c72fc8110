"""`cuda.bindings.driver` without a GPU: the rules of its virtual memory, and no memory.

What a chunk holds is kept by handle, so that laws about contents can be stated: `write` and `read` take an address.
"""

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20
GRANULARITY = 2 * MIB


class Status(IntEnum):
    """`CUresult`, as far as it is needed."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


OK, INVALID, OUT_OF_MEMORY = Status


class FakeDriver:
    """Calls are counted in `calls`; the one that finds `fail_in` at 0 fails, and so do the next `num_failures - 1`."""

    CUresult = Status
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED="vmm",
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED="rdma",
    )
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, *, memory_bytes: int = 1 << 40, can_remap: bool = True) -> None:
        self.calls: list[str] = []
        self.fail_in: int | None = None
        self.num_failures = 1
        self.contexts = 0
        self.handles: dict[int, int] = {}  # handle -> bytes
        self.ranges: dict[int, int] = {}  # address -> bytes
        self.mapped: dict[int, int] = {}  # address -> handle
        self.readable: set[int] = set()
        self._bytes: dict[int, int] = {}  # handle -> what it holds
        self._free_bytes, self._can_remap = memory_bytes, can_remap
        self._next_handle, self._next_address = 1, 1 << 40

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("cuMem"):
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if self.fail_in is not None:
                self.fail_in -= 1
                if self.fail_in < 0:
                    self.num_failures -= 1
                    self.fail_in = 0 if self.num_failures else None
                    return (OUT_OF_MEMORY, None)
            return found(*arguments)

        return call

    def write(self, address: int, value: int) -> None:
        self._bytes[self._seen(address)] = value

    def read(self, address: int) -> int:
        return self._bytes[self._seen(address)]

    def _seen(self, address: int) -> int:
        assert address in self.readable, "a kernel read what it may not"
        return self.mapped[address]

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())

    @staticmethod
    def CUmemAccessDesc() -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    def cuInit(self, flags: int) -> tuple[Any]:
        return (OK,)

    def cuDeviceGet(self, index: int) -> tuple[Any, int]:
        return OK, index

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, int]:
        return OK, 7

    def cuCtxGetCurrent(self) -> tuple[Any, int]:
        return OK, self.contexts

    def cuCtxSetCurrent(self, context: int) -> tuple[Any]:
        self.contexts = context
        return (OK,)

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Any, int]:
        return OK, int(attribute == "vmm" and self._can_remap)

    def cuMemGetAllocationGranularity(self, properties: Any, option: int) -> tuple[Any, int]:
        return OK, GRANULARITY

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, int | None]:
        assert properties.type == 1 and properties.location.type == 1 and size % GRANULARITY == 0
        if size > self._free_bytes:
            return OUT_OF_MEMORY, None
        self._free_bytes -= size
        self._next_handle += 1
        self.handles[self._next_handle] = size
        return OK, self._next_handle

    def cuMemRelease(self, handle: int) -> tuple[Any]:
        assert handle not in self.mapped.values(), "memory was kept by a mapping"
        self._free_bytes += self.handles.pop(handle)
        return (OK,)

    def cuMemAddressReserve(self, size: int, alignment: int, hint: int, flags: int) -> tuple[Any, int]:
        address = self._next_address
        self._next_address += size + GRANULARITY
        self.ranges[address] = size
        return OK, address

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any]:
        if self.ranges.get(address) != size or any(address <= a < address + size for a in self.mapped):
            return (INVALID,)
        del self.ranges[address]
        return (OK,)

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any]:
        is_reserved = any(start <= address and address + size <= start + n for start, n in self.ranges.items())
        is_empty = all(a + self.handles[h] <= address or address + size <= a for a, h in self.mapped.items())
        if not (is_reserved and is_empty and offset == 0 and self.handles.get(handle) == size):
            return (INVALID,)
        self.mapped[address] = handle
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any]:
        assert len(access) == count == 1 and access[0].flags == 3
        places = self._whole(address, size)
        if places is None:
            return (INVALID,)
        self.readable.update(places)
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any]:
        places = self._whole(address, size)
        if places is None:
            return (INVALID,)
        for place in places:
            del self.mapped[place]
            self.readable.discard(place)
        return (OK,)

    def _whole(self, address: int, size: int) -> list[int] | None:
        """The mappings that make up exactly this range, or None."""
        places, at = [], address
        while at < address + size:
            if at not in self.mapped:
                return None
            places.append(at)
            at += self.handles[self.mapped[at]]
        return places if at == address + size else None
