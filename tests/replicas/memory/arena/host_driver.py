"""CUDA's driver without a GPU: NVIDIA's own `cuda-bindings` over a `libcuda` whose memory is pages (`libcuda.c`)."""

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

GRANULARITY = 2 << 20  # as on GPUs
SOURCE = Path(__file__).with_name("libcuda.c")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler: apt install gcc")


class HostDriver:
    """The one driver that a process has, from here on with so much free memory. This thread has no context yet."""

    def __init__(self, *, memory_bytes: int = 1 << 40, can_remap: bool = True) -> None:
        self._library = _load()
        self._library.host_begin(ctypes.c_size_t(memory_bytes), int(can_remap))
        self._num_seen = 0  # names of calls that `forget` passed over

    @property
    def calls(self) -> list[str]:
        """Names of the `cuMem` functions that were called, since `forget`."""
        return self._library.host_names().decode().split()[self._num_seen :]

    def forget(self) -> None:
        """From here on `calls` begins anew."""
        self._num_seen += len(self.calls)

    def fail(self, after: int, times: int = 1) -> None:
        """So many `cuMem` calls go well, then some find no memory."""
        self._library.host_fail(after, times)

    @property
    def num_handles(self) -> int:
        """Allocations that there are."""
        return int(self._library.host_num_handles())

    @property
    def num_reserved(self) -> int:
        """Address ranges that are reserved."""
        return int(self._library.host_num_reserved())

    @property
    def num_mapped(self) -> int:
        """Places where an allocation is mapped."""
        return int(self._library.host_num_mapped())

    def launch(self, address: int, num_bytes: int) -> None:
        """A kernel uses these bytes until the device is waited for. To unmap them meanwhile is refused."""
        self._library.host_launch(ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def handle(self, address: int) -> int:
        """The allocation that is read and written at `address`; 0: a kernel would fail there."""
        return int(self._library.host_readable(ctypes.c_uint64(address)))

    def is_rdma_capable(self, handle: int) -> bool:
        """Whether network cards may read this allocation."""
        return bool(self._library.host_is_rdma_capable(ctypes.c_uint64(handle)))

    def write(self, address: int, value: int) -> None:
        """Writes a number at the beginning and the end of the chunk at `address`."""
        for word in self._ends(address):
            word.value = value

    def read(self, address: int) -> int:
        """The number that was written there."""
        first, last = (word.value for word in self._ends(address))
        assert first == last
        return int(first)

    def _ends(self, address: int) -> tuple[ctypes.c_int64, ctypes.c_int64]:
        assert self.handle(address), "a kernel read what it may not"
        return ctypes.c_int64.from_address(address), ctypes.c_int64.from_address(address + GRANULARITY - 8)


@cache
def _load() -> ctypes.CDLL:
    """Compiles and loads it, before `cuda-bindings` look for a library of that name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "libcuda.so.1"
        flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{path.name}"]
        subprocess.run(["cc", *flags, "-o", path, SOURCE], check=True, timeout=60)
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    library.host_names.restype = ctypes.c_char_p
    library.host_readable.restype = ctypes.c_uint64
    return library
