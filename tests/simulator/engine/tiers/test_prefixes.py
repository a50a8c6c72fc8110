"""vLLM's own offloading of prefixes: what the device forgot is found on the host, after its copy."""

import pytest

from pengserve.planners.types.snapshot import KvCapacity
from pengserve.simulator.engine.options import SchedulerOptions
from pengserve.simulator.engine.tiers.prefixes import PrefixOffloadScheduler
from pengserve.simulator.requests import Arrival, LiveRequest

CAPACITY = KvCapacity(
    num_blocks=24, block_size=16, bytes_per_block=1000, max_model_len=384, max_num_seqs=8, weight_bytes=0
)


def request(name: str, first_id: int) -> LiveRequest:
    ids = tuple(range(first_id, first_id + 12))
    return LiveRequest(
        Arrival(request_id=name, at_s=0.0, prompt_tokens=200, output_tokens=4, prefix_ids=ids, prefix_block=16)
    )


def served(scheduler: PrefixOffloadScheduler, one: LiveRequest) -> float:
    """Runs one request to its end; seconds that its steps waited."""
    scheduler.add(one)
    waited_s = 0.0
    while (step := scheduler.schedule()) is not None:
        waited_s += step.wait_s
        scheduler.finish(step)
    assert one.is_done
    return waited_s


@pytest.mark.parametrize(("host_blocks", "cached", "waited_s"), [(100, 192, 0.12), (20, 0, 0.0)])
def test_a_second_turn_is_loaded_where_the_host_kept_it(host_blocks: int, cached: int, waited_s: float) -> None:
    scheduler = PrefixOffloadScheduler(
        CAPACITY, SchedulerOptions(max_num_batched_tokens=64), host_blocks, 100_000.0, lambda: 0.0
    )
    served(scheduler, request("first", 0))
    for index in range(4):  # these push it off the device, and off a small host
        served(scheduler, request(f"other{index}", 1000 * (index + 1)))
    again = request("second", 0)
    assert served(scheduler, again) == pytest.approx(waited_s)
    assert again.cached_tokens == cached
    assert scheduler.num_free == CAPACITY.num_blocks
