"""Laws of the CUDA backend's calls, with a driver that keeps the rules of virtual memory but has no GPU."""

import pytest
import torch

from pengserve.planners.types.errors import ConfigError, EngineError, StepError
from pengserve.replicas.memory.arena.arena import Arena
from pengserve.replicas.memory.arena.cuda import CudaBackend
from tests.replicas.memory.arena.fake_driver import GRANULARITY, FakeDriver

DEVICE = torch.device("cuda:0")


def opened(driver: FakeDriver, num_chunks: int = 8) -> Arena:
    return Arena(CudaBackend(DEVICE, driver), num_chunks * GRANULARITY, GRANULARITY)


def test_access_is_set_once_for_chunks_that_are_mapped_together() -> None:
    driver = FakeDriver()
    arena = opened(driver)
    region = arena.reserve(8 * GRANULARITY, "r")
    driver.calls.clear()
    arena.map(region, 1, 6)
    assert driver.calls == ["cuMemMap"] * 5 + ["cuMemSetAccess"]
    assert arena.counters.map_calls == 6


def test_handles_that_are_mapped_together_are_unmapped_by_one_call() -> None:
    driver = FakeDriver()
    arena = opened(driver)
    a, b = (arena.reserve(8 * GRANULARITY, name) for name in "ab")
    arena.map(a, 0, 6)
    driver.calls.clear()
    arena.move(a, (1, 5), b, 0)
    assert driver.calls == ["cuMemMap"] * 4 + ["cuMemSetAccess", "cuMemUnmap"]


@pytest.mark.parametrize("fail_in", range(4))
def test_a_map_that_fails_halfway_leaves_nothing_mapped(fail_in: int) -> None:
    driver = FakeDriver()
    arena = opened(driver)
    a, b = (arena.reserve(8 * GRANULARITY, name) for name in "ab")
    arena.map(a, 0, 2)
    before = dict(driver.mapped), set(driver.readable)
    driver.fail_in = fail_in  # three cuMemMap, then cuMemSetAccess
    with pytest.raises(StepError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        arena.map(b, 0, 3)
    assert (driver.mapped, driver.readable) == before
    assert arena.check() == () and arena.num_free == 6


def test_a_map_that_cannot_be_undone_says_so() -> None:
    driver = FakeDriver()
    arena = opened(driver)
    region = arena.reserve(8 * GRANULARITY, "r")
    driver.fail_in, driver.num_failures = 2, 2  # the third cuMemMap, and the cuMemUnmap after it
    with pytest.raises(EngineError, match="cannot be unmapped again"):
        arena.map(region, 0, 3)
    driver.mapped.clear()  # what the arena knows nothing of


def test_memory_that_the_device_has_not_is_refused_and_none_is_kept() -> None:
    driver = FakeDriver(memory_bytes=5 * GRANULARITY)
    with pytest.raises(ConfigError, match=r"wants 16.0 MiB of cuda:0 and got 10.0 MiB"):
        opened(driver)
    assert driver.handles == {}


def test_chunks_are_multiples_of_what_the_device_maps() -> None:
    with pytest.raises(ConfigError, match="choose a multiple of 2097152"):
        Arena(CudaBackend(DEVICE, FakeDriver()), 8 * GRANULARITY, 64 << 10)


def test_a_device_that_cannot_remap_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot remap its memory"):
        CudaBackend(DEVICE, FakeDriver(can_remap=False))


def test_a_thread_that_has_a_context_keeps_it() -> None:
    driver = FakeDriver()
    opened(driver)
    assert driver.contexts == 7
    driver.contexts = 9
    opened(driver)
    assert driver.contexts == 9


def test_close_gives_all_handles_back() -> None:
    driver = FakeDriver()
    arena = opened(driver)
    region = arena.reserve(8 * GRANULARITY, "r")
    arena.map(region, 1, 3)
    arena.map(region, 5, 6)
    arena.close()
    arena.close()
    assert (driver.handles, driver.mapped) == ({}, {})
    assert len(driver.ranges) == 1


def test_an_arena_that_nobody_has_any_more_leaves_nothing() -> None:
    driver = FakeDriver()
    arena = opened(driver)
    arena.map(arena.reserve(8 * GRANULARITY, "r"), 1, 3)
    arena._finalizer()  # what the garbage collector calls
    assert (driver.handles, driver.mapped, driver.ranges) == ({}, {}, {})
