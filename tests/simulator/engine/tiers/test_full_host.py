"""A full host: production's choice of requests must always be one that the device can step."""

import random

import pytest

from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.engine.memory import Tiers
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.tiers.scheduler import TieredScheduler
from pengserve.simulator.requests import Arrival, LiveRequest
from pengserve.simulator.timing.steps import Batch


class Times:
    def step_s(self, batch: Batch) -> float:
        return 0.01

    decodes_s = steps_within = step_s  # type: ignore[assignment]


def ended(host_blocks: int, seed: int) -> int:
    """Thirty requests at once, whose KV is more than device and host hold; how many end."""
    tiers = Tiers(num_layers=8, device_blocks=65, host_blocks=host_blocks, block_bytes=8192, bytes_per_s=1e12)
    capacity = KvCapacity(
        num_blocks=tiers.num_logical(512, 16), block_size=16, bytes_per_block=65536, max_model_len=512,
        max_num_seqs=64, weight_bytes=0,
    )  # fmt: skip
    options = SchedulerOptions(max_num_batched_tokens=256)
    scheduler = TieredScheduler(capacity, options, tiers, Times(), lambda: 0.0)  # type: ignore[arg-type]
    rng = random.Random(seed)
    lives = [
        LiveRequest(
            Arrival(
                request_id=f"r{i}", at_s=i * 0.01, prompt_tokens=rng.choice([60, 200, 400]),
                output_tokens=rng.randint(20, 100),
            )
        )
        for i in range(30)
    ]  # fmt: skip
    for live in lives:
        scheduler.add(live)
    while (step := scheduler.schedule()) is not None:
        scheduler.finish(step)
        scheduler.tiers.traffic.wait(scheduler.tiers.traffic.copies())
        assert scheduler.tiers.check() == ()
    return sum(live.is_done for live in lives)


@pytest.mark.parametrize("host_blocks", [10, 40, 80])
@pytest.mark.parametrize("seed", range(6))
def test_requests_end_with_a_full_host(seed: int, host_blocks: int) -> None:
    """Parked requests hold what the host has no row for; where the step has too little, the youngest give up theirs."""
    assert ended(host_blocks, seed) == 30
