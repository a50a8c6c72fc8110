"""The simulator's host tier is production's: the same sizes, the same choices, the same tables."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pengserve.planners.types.snapshot import KvCapacity
from pengserve.replicas.engine.tiers.tier_memory import tier_sizes
from pengserve.replicas.kv.copies import Copy, CopyEngine, Priority
from pengserve.replicas.kv.host_tier import HostTier
from pengserve.replicas.kv.pool import DevicePool, seen_twice
from pengserve.replicas.kv.tiered import TieredKv
from pengserve.replicas.memory.arena.cpu import CpuBackend
from pengserve.simulator.engine.memory import Sizes, Tiers
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.tiers import scheduler as module
from pengserve.simulator.engine.tiers.scheduler import TieredScheduler
from pengserve.simulator.requests import Arrival, LiveRequest
from pengserve.simulator.timing.steps import Batch

BLOCK, LAYERS, BLOCK_BYTES = 16, 4, 8192
INSTANT = float("inf")  # a copy ends where it is waited for, and moves no clock
TIERS = Tiers(num_layers=LAYERS, device_blocks=33, host_blocks=120, block_bytes=BLOCK_BYTES, bytes_per_s=INSTANT)


class Times:
    def step_s(self, batch: Batch) -> float:
        return 0.01

    decodes_s = steps_within = step_s  # type: ignore[assignment]


class StillEngine(CopyEngine):
    """Production's engine. A copy counts as ended where the caller waits for it, or for one that goes after it.

    So what the thread does meanwhile changes nothing, and steps can be compared.
    """

    def __init__(self, pool: DevicePool, host: HostTier) -> None:
        super().__init__(pool, host)
        self.order: list[Copy] = []
        self.ended: list[Copy] = []

    def submit(self, copy: Copy) -> Copy:
        self.order.append(copy)
        return super().submit(copy)

    def wait(self, copy: Copy) -> None:
        same = [c for c in self.order if c.to_host == copy.to_host] if copy in self.order else []
        for other in sorted(same, key=lambda c: c.priority):
            super().wait(other)
            self.order.remove(other)
            self.ended.append(other)
            if other is copy:
                break

    def hurry(self, copies: list[Copy]) -> None:
        super().hurry(copies)
        for copy in copies:
            copy.priority = Priority.STAGE  # also where the thread has ended it

    def cancel(self, copy: Copy) -> None:
        super().cancel(copy)
        super().wait(copy)
        if copy in self.order:
            self.order.remove(copy)
            self.ended.append(copy)

    def finished(self) -> list[Copy]:
        super().finished()
        found, self.ended = self.ended, []
        return found


class RealTiers(TieredKv):
    """Production's, with real memory; a step's layers are read as soon as they are there."""

    def __init__(self, *, num_layers: int, device_blocks: int, host_blocks: int, num_blocks: int, **_: Any) -> None:
        memory = seen_twice(CpuBackend(), num_layers * device_blocks * BLOCK_BYTES)
        pool = DevicePool(memory, num_layers, device_blocks, BLOCK_BYTES)
        host = HostTier(num_layers, host_blocks, BLOCK_BYTES)
        super().__init__(pool, host, num_blocks=num_blocks, block_size=BLOCK)
        self.engine.close()
        self.engine = self.traffic.engine = StillEngine(pool, host)
        self.link = self
        self.now_s, self.rate, self.block_bytes = 0.0, 1.0, 1

    def stage_all(self) -> tuple[list[int], int]:
        step = self._current
        if step is None or not step.waits:
            return [], 0
        for layer in range(self.pool.num_layers):
            if (copy := step.waits.get(layer)) is not None:
                CopyEngine.wait(self.engine, copy)
            self.read_layer(layer)
        return [len(step.waits[i].cells) if i in step.waits else 0 for i in range(self.pool.num_layers)], len(step.ring)

    def next_end_s(self) -> float | None:
        return 0.0 if self.traffic.copies() else None

    def go_on_to(self, at_s: float) -> None:
        self.traffic.wait(self.traffic.copies())


def built(clock: Callable[[], float]) -> TieredScheduler:
    num_blocks = TIERS.num_logical(600, BLOCK)
    capacity = KvCapacity(
        num_blocks=num_blocks, block_size=BLOCK, bytes_per_block=LAYERS * BLOCK_BYTES, max_model_len=600,
        max_num_seqs=16, weight_bytes=0,
    )  # fmt: skip
    options = SchedulerOptions(max_num_batched_tokens=128, prefix_caching=True)
    return TieredScheduler(capacity, options, TIERS, Times(), clock)  # type: ignore[arg-type]


def requests(seed: int) -> list[LiveRequest]:
    rng, found = random.Random(seed), []
    for index in range(14):
        prompt, output = rng.choice([20, 60, 150, 400]), rng.randint(2, 60)
        ids = tuple(range(prompt // BLOCK)) if index % 3 == 0 else ()
        arrival = Arrival(
            request_id=f"r{index}", at_s=index * 0.01, prompt_tokens=prompt, output_tokens=output, prefix_ids=ids,
            prefix_block=BLOCK if ids else 0,
        )  # fmt: skip
        found.append(LiveRequest(arrival))
    return found


def followed(scheduler: TieredScheduler, seed: int) -> list[tuple[Any, ...]]:
    """What was stepped, parked and on the device in each step."""
    rng, left, seen = random.Random(seed), requests(seed), []
    while left or scheduler.running or scheduler.waiting:
        while left and rng.random() < 0.3:
            scheduler.add(left.pop(0))
        step = scheduler.schedule()
        if step is None:
            assert left
            continue
        tiers = scheduler.tiers
        parked = sorted(request.request_id for request in scheduler.residency.parked)
        on_device = (tiers.placement.index != 0).sum(axis=1).tolist()
        seen.append((sorted(r.request_id for r in step.requests), step.batch, parked, on_device))
        scheduler.finish(step)
        tiers.traffic.wait(tiers.traffic.copies())  # both have copied all: time is not compared here
        assert tiers.check() == ()
        assert len(seen) < 5000
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_simulator_and_production_step_park_and_place_alike(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    virtual = followed(built(lambda: 0.0), seed)
    monkeypatch.setattr(module, "VirtualTiers", RealTiers)
    real = built(lambda: 0.0)
    assert followed(real, seed) == virtual
    real.tiers.close()
    assert any(parked for _, _, parked, _ in virtual), "nothing was ever short"


def test_an_instance_has_the_blocks_that_production_gives_it() -> None:
    sizes = Sizes(
        memory_bytes=(1 << 30) + 64 * LAYERS * 65536, weight_bytes=1 << 30, num_layers=LAYERS, layer_bytes=1 << 20,
        token_bytes=LAYERS * 65536 // BLOCK, num_kv_heads=4, max_model_len=2000, host_bytes=200 * LAYERS * 65536,
        link_bytes_per_s=1e9,
    )  # fmt: skip
    theirs = tier_sizes(
        num_layers=LAYERS, block_size=BLOCK, block_bytes=65536, device_bytes=64 * LAYERS * 65536,
        host_bytes=sizes.host_bytes, max_model_len=2000, page_bytes=4096,
    )  # fmt: skip
    assert sizes.tiers is not None
    assert sizes.tiers.device_blocks == theirs.device_blocks
    assert sizes.dp.num_blocks == theirs.num_blocks - 1
    assert sizes.dp.max_model_len == 2000


def test_copies_cost_time() -> None:
    slow = Tiers(num_layers=LAYERS, device_blocks=33, host_blocks=120, block_bytes=BLOCK_BYTES, bytes_per_s=2e6)
    clock = [0.0]
    scheduler = TieredScheduler(
        built(lambda: 0.0).capacity,
        SchedulerOptions(max_num_batched_tokens=128),
        slow,
        Times(),
        lambda: clock[0],  # type: ignore[arg-type]
    )
    left, waited_s, stalled_s = requests(1), 0.0, 0.0
    for request in left:
        scheduler.add(request)
    while (step := scheduler.schedule()) is not None:
        waited_s, stalled_s = waited_s + step.wait_s, stalled_s + step.stall_s
        clock[0] += step.wait_s + 0.01 + step.stall_s
        scheduler.finish(step)
    assert all(request.is_done for request in left)
    assert waited_s > 0
    assert stalled_s > 0
    assert np.isclose(scheduler.stalled_s, stalled_s)
