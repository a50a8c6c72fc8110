"""Laws of the calls of the CUDA backend: NVIDIA's bindings, and a driver that keeps the rules over pages."""

import gc
import subprocess
import sys
from threading import Thread
from typing import Any

import pytest
import torch

from pengserve.planners.types.errors import ConfigError, EngineError, StepError
from pengserve.replicas.memory.arena.arena import Arena
from pengserve.replicas.memory.arena.cuda import CudaBackend
from tests.replicas.memory.arena.host_driver import GRANULARITY, HostDriver, needs_compiler

pytestmark = needs_compiler
DEVICE = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def nothing_is_left_of_others() -> None:
    """A process has one driver: arenas that nobody has any more give back what they had of it."""
    gc.collect()


def opened(num_chunks: int = 8) -> Arena:
    return Arena(CudaBackend(DEVICE), num_chunks * GRANULARITY, GRANULARITY)


def test_access_is_set_once_for_chunks_that_are_mapped_together() -> None:
    driver = HostDriver()
    arena = opened()
    region = arena.reserve(8 * GRANULARITY, "r")
    driver.forget()
    arena.map(region, 1, 6)
    assert driver.calls == ["cuMemMap"] * 5 + ["cuMemSetAccess"]
    assert arena.counters.map_calls == 6


def test_handles_that_are_mapped_together_are_unmapped_by_one_call() -> None:
    driver = HostDriver()
    arena = opened()
    a, b = (arena.reserve(8 * GRANULARITY, name) for name in "ab")
    arena.map(a, 0, 6)
    driver.forget()
    arena.move(a, (1, 5), b, 0)
    assert driver.calls == ["cuMemMap"] * 4 + ["cuMemSetAccess", "cuMemUnmap"]


def test_memory_takes_its_bytes_along() -> None:
    driver = HostDriver()
    arena = opened()
    a, b = (arena.reserve(8 * GRANULARITY, name) for name in "ab")
    arena.map(a, 0, 3)
    for chunk in range(3):
        driver.write(a.address + chunk * GRANULARITY, 10 + chunk)
    arena.move(a, (1, 3), b, 4)
    assert [driver.read(b.address + chunk * GRANULARITY) for chunk in (4, 5)] == [11, 12]
    assert driver.read(a.address) == 10 and not driver.handle(a.address + GRANULARITY)


def test_memory_changes_hands_only_when_no_kernel_uses_it() -> None:
    driver = HostDriver()
    arena = opened()
    a, b = (arena.reserve(8 * GRANULARITY, name) for name in "ab")
    arena.map(a, 0, 4)
    driver.launch(a.address, 4 * GRANULARITY)
    arena.unmap(a, 3, 4)
    driver.launch(a.address, 3 * GRANULARITY)
    arena.move(a, (1, 3), b, 0)
    driver.launch(b.address, 2 * GRANULARITY)
    arena.close()
    assert driver.num_mapped == driver.num_handles == 0


def test_the_driver_of_these_tests_refuses_memory_that_is_in_use() -> None:
    driver = HostDriver()
    backend = CudaBackend(DEVICE)
    arena = Arena(backend, 8 * GRANULARITY, GRANULARITY)
    region = arena.reserve(8 * GRANULARITY, "r")
    arena.map(region, 0, 2)
    driver.launch(region.address + GRANULARITY, 1)
    with pytest.raises(StepError, match="ILLEGAL_ADDRESS"):
        backend.unmap(region.address, 2)
    backend.wait()


def test_network_cards_may_read_where_they_can() -> None:
    driver = HostDriver()
    arena = opened()
    region = arena.reserve(GRANULARITY, "r")
    arena.map(region, 0, 1)
    assert driver.is_rdma_capable(driver.handle(region.address))


@pytest.mark.parametrize("fail_in", range(4))
def test_a_map_that_fails_halfway_leaves_nothing_mapped(fail_in: int) -> None:
    driver = HostDriver()
    arena = opened()
    a, b = (arena.reserve(8 * GRANULARITY, name) for name in "ab")
    arena.map(a, 0, 2)
    driver.fail(fail_in)  # three cuMemMap, then cuMemSetAccess
    with pytest.raises(StepError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        arena.map(b, 0, 3)
    assert driver.num_mapped == 2
    assert [bool(driver.handle(a.address + chunk * GRANULARITY)) for chunk in range(3)] == [True, True, False]
    assert arena.check() == () and arena.num_free == 6


def test_a_map_that_cannot_be_undone_says_so() -> None:
    driver = HostDriver()
    arena = opened()
    region = arena.reserve(8 * GRANULARITY, "r")
    driver.fail(2, times=2)  # the third cuMemMap, and the cuMemUnmap after it
    with pytest.raises(EngineError, match="the rollback failed too"):
        arena.map(region, 0, 3)
    arena._backend.unmap(region.address, 2)  # what the arena knows nothing of


def test_memory_that_the_device_has_not_is_refused_and_none_is_kept() -> None:
    driver = HostDriver(memory_bytes=5 * GRANULARITY)
    with pytest.raises(ConfigError, match=r"wants 16.0 MiB of cuda:0 and got 10.0 MiB"):
        opened()
    assert driver.num_handles == 0


def test_chunks_are_multiples_of_what_the_device_maps() -> None:
    HostDriver()
    with pytest.raises(ConfigError, match="choose a multiple of 2097152"):
        Arena(CudaBackend(DEVICE), 8 * GRANULARITY, 64 << 10)


def test_a_device_that_cannot_remap_is_refused() -> None:
    HostDriver(can_remap=False)
    with pytest.raises(ConfigError, match="cannot remap its memory"):
        CudaBackend(DEVICE)


def test_a_device_that_is_not_there_is_refused() -> None:
    HostDriver()
    with pytest.raises(ConfigError, match="cuda:3 cannot have an arena: cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE"):
        CudaBackend(torch.device("cuda:3"))


def test_a_machine_without_a_driver_is_told_so() -> None:
    """In a process of its own: here the library is loaded."""
    code = """
import torch
from pengserve.replicas.memory.arena.cuda import CudaBackend
try:
    CudaBackend(torch.device("cuda:0"))
except Exception as error:
    print(type(error).__name__, error)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.startswith("ConfigError cuda:0 cannot have an arena: NVIDIA's driver does not load")


def test_a_thread_without_a_context_gets_the_devices_and_one_that_has_another_keeps_it() -> None:
    HostDriver()
    driver = _bindings()
    arena = opened()
    region = arena.reserve(8 * GRANULARITY, "r")
    assert int(driver.cuCtxGetCurrent()[1]) == 7
    driver.cuCtxSetCurrent(9)
    arena.map(region, 0, 1)
    assert int(driver.cuCtxGetCurrent()[1]) == 9
    seen: list[int] = []

    def elsewhere() -> None:
        arena.map(region, 1, 2)
        seen.append(int(driver.cuCtxGetCurrent()[1]))

    thread = Thread(target=elsewhere)
    thread.start()
    thread.join(30)
    assert seen == [7] and region.mapped == ((0, 2),)


def test_close_gives_all_handles_back() -> None:
    driver = HostDriver()
    arena = opened()
    region = arena.reserve(8 * GRANULARITY, "r")
    arena.map(region, 1, 3)
    arena.map(region, 5, 6)
    arena.close()
    arena.close()
    assert (driver.num_handles, driver.num_mapped, driver.num_reserved) == (0, 0, 1)


def test_an_arena_that_nobody_has_any_more_leaves_nothing() -> None:
    driver = HostDriver()
    arena = opened()
    arena.map(arena.reserve(8 * GRANULARITY, "r"), 1, 3)
    arena._finalizer()  # what the garbage collector calls
    assert (driver.num_handles, driver.num_mapped, driver.num_reserved) == (0, 0, 0)


def _bindings() -> Any:
    from cuda.bindings import driver

    return driver


def test_an_arena_that_cannot_grow_keeps_what_it_has() -> None:
    driver = HostDriver(memory_bytes=8 * GRANULARITY)
    arena = opened(4)
    region = arena.reserve(8 * GRANULARITY, "r")
    arena.map(region, 0, 4)
    arena.grow(2)
    with pytest.raises(ConfigError, match="the arena wants"):
        arena.grow(3)
    assert driver.num_handles == arena.num_chunks == 6 and arena.check() == ()
    arena.map(region, 4, 6)
    arena.close()
    assert driver.num_handles == 0
