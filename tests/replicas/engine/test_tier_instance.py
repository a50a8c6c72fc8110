"""Laws of an instance with a host tier: requests of all kinds answer as without one, and clients may leave."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.contract import Contract, Slo
from tests.support.cut_requests import SAMPLING, Reader, make_request, reading
from tests.support.processes import CHANNEL_TOKEN, ENGINE, InstanceProcess

pytestmark = pytest.mark.slow

BLOCK_BYTES = 4 * 16384  # of the tiny model, over its four layers
PROMPTS = [[random.Random(length).randrange(10, 500) for _ in range(length)] for length in (31, 150, 500)]


@pytest.fixture(scope="module")
def tiered(model: Path) -> Iterator[InstanceProcess]:
    """An instance whose device holds 19 blocks of 32 tokens, and its host 300."""
    config = InstanceConfig(
        app="tests",
        model=str(model),
        engine={**ENGINE, "kv_cache_memory_bytes": 20 * BLOCK_BYTES},
        channel_token=CHANNEL_TOKEN,
        host_bytes=300 * BLOCK_BYTES,
        link_bytes_per_s=1e9,
    )
    process = InstanceProcess(config=config, instance_id=7)
    process.wait_ready()
    yield process
    assert process.stop() == 0


@pytest_asyncio.fixture(scope="module")
async def readers(instances: list[InstanceProcess], tiered: InstanceProcess) -> AsyncIterator[list[Reader]]:
    async with reading([instances[0], tiered]) as found:
        yield found


async def test_requests_of_all_kinds_answer_as_without_a_host_tier(readers: list[Reader]) -> None:
    names = [f"{kind}/{index}" for kind in SAMPLING for index in range(len(PROMPTS))]
    for reader in readers:
        for name in names:
            kind, index = name.split("/")
            reader.link.add(make_request(name, PROMPTS[int(index)], SAMPLING[kind]))
        await reader.until(names)
    plain, tiered = readers
    assert {name: tiered.tokens[name] for name in names} == {name: plain.tokens[name] for name in names}
    assert {name: tiered.finished[name] for name in names} == {name: plain.finished[name] for name in names}
    stats = tiered.link.stats
    assert stats.total_parked > 0 and stats.total_preemptions == 0
    assert stats.host_blocks == 300 and stats.device_blocks == 19
    assert stats.total_evicted_bytes + stats.total_behind_bytes > 0


async def test_ingresses_hear_how_long_requests_were_parked_and_what_was_copied(readers: list[Reader]) -> None:
    """Where decoding requests are parked for want of room, with and without an SLO; the tokens are those without."""
    plain, tiered = readers
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    names = [f"long/{index}" for index in range(6)]
    contract = Contract(slo=Slo(tbt_s=5.0), low_tokens=200)
    for reader in readers:
        for index, name in enumerate(names):
            more = {"contract": contract} if index % 2 else {}
            reader.link.add(make_request(name, PROMPTS[index % 2], params), **more)
        await reader.until(names)
    assert {name: tiered.tokens[name] for name in names} == {name: plain.tokens[name] for name in names}
    assert plain.pauses == []
    new = [pause for pause in tiered.pauses if pause.request_id in names]
    assert new and all(pause.seconds > 0 for pause in new)
    stats = tiered.link.stats
    moved = stats.total_staged_bytes + stats.total_brought_bytes + stats.total_evicted_bytes + stats.total_behind_bytes
    assert 0 < sum(pause.swapped_bytes for pause in tiered.pauses) <= moved


async def test_clients_that_leave_free_what_their_requests_had(readers: list[Reader]) -> None:
    _, tiered = readers
    endless = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
    names = [f"endless/{index}" for index in range(9)]
    for index, name in enumerate(names):
        tiered.link.add(make_request(name, PROMPTS[index % len(PROMPTS)], endless))
    tiered.link.add(make_request("short", PROMPTS[0], SAMPLING["greedy"]))
    await tiered.until(["short"])
    tiered.link.abort(names)
    await asyncio.sleep(0)
    tiered.link.add(make_request("after", PROMPTS[0], SAMPLING["greedy"]))
    await tiered.until(["after"])
    stats = tiered.link.stats
    assert (stats.num_running, stats.num_waiting, stats.num_parked, stats.kv_blocks_used) == (0, 0, 0, 0)
