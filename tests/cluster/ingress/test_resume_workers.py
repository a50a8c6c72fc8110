"""Instances whose engine has workers of its own (tensor parallelism inside vLLM): what they resume, what they leave."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

pytest.importorskip("vllm")
from vllm import SamplingParams

from pengserve.planners.types.errors import LinkLostError
from pengserve.replicas.engine.link import InstanceLink
from tests.support.ingress import MODEL_NAME, FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import CHANNEL_TOKEN, InstanceProcess, start_instances
from tests.support.streams import Stream, make_prompts, stream_completion
from tests.support.vllm_requests import sent_request

pytestmark = [pytest.mark.slow, pytest.mark.shapes, pytest.mark.timeout(1200)]

NUM_TOKENS = 120
PROMPTS = make_prompts(4, longest=150)  # the longest is prefilled in two chunks
WORKERS = {"tensor_parallel_size": 2}
END_TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[list[InstanceProcess]]:
    """Two instances of two workers each. Tests kill one."""
    processes = start_instances(model, [0, 1], engine=WORKERS)
    yield processes
    for process in processes:
        process.kill()


async def streams(url: str, begun: asyncio.Event | None = None) -> list[Stream]:
    """All prompts at once; `begun` is set when each has brought a token."""
    async with httpx.AsyncClient(base_url=url) as http:
        found = [Stream() for _ in PROMPTS]
        running = [
            asyncio.create_task(stream_completion(http, MODEL_NAME, prompt, NUM_TOKENS, into=into))
            for prompt, into in zip(PROMPTS, found, strict=True)
        ]
        while begun is not None and not begun.is_set():
            if all(len(stream.token_ids) > 2 for stream in found):
                begun.set()
            await asyncio.sleep(0.01)
        return await asyncio.wait_for(asyncio.gather(*running), END_TIMEOUT_S)


def workers_of(process: InstanceProcess) -> list[psutil.Process]:
    """Processes in which its engine computes."""
    children = psutil.Process(process.process.pid).children()
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


async def num_resumed(process: InstanceProcess) -> int:
    """Half-decoded requests that it has taken over in its life."""
    link = await InstanceLink.connect(process.endpoint, token=CHANNEL_TOKEN, client_id="test", timeout_s=60)
    await anext(link.events())
    await link.close()
    return link.stats.total_resumed


async def test_a_survivor_takes_over_and_nothing_stays_of_the_dead(pair: list[InstanceProcess]) -> None:
    doomed, survivor = pair
    workers = workers_of(doomed)
    assert len(workers) == 2
    try:
        with serving(ingress_config(pair), FixedRoutes(pair)) as url:
            wait_ready(url)
            expected = await streams(url)
            assert all(stream.done and not stream.error and len(stream.token_ids) == NUM_TOKENS for stream in expected)
            begun = asyncio.Event()
            running = asyncio.create_task(streams(url, begun))
            await asyncio.wait_for(begun.wait(), END_TIMEOUT_S)
            for worker in workers:
                worker.suspend()  # like one that hangs in a collective: it can do nothing about its own end
            doomed.kill()
            resumed = await running
            assert [stream.error for stream in resumed] == [""] * len(PROMPTS)
            assert [stream.token_ids for stream in resumed] == [stream.token_ids for stream in expected]
            assert await num_resumed(survivor) > 0, "the instance died when its work was done"
            again = await streams(url)
            assert [stream.token_ids for stream in again] == [stream.token_ids for stream in expected]
        await wait_ended(workers)
    finally:
        for worker in filter(is_alive, workers):
            worker.kill()


async def test_the_death_of_a_worker_ends_the_channel(pair: list[InstanceProcess]) -> None:
    """So that ingresses resume its requests elsewhere at once, however long the rest of the engine takes to end."""
    survivor = pair[1]
    link = await InstanceLink.connect(survivor.endpoint, token=CHANNEL_TOKEN, client_id="test", timeout_s=60)
    workers_of(survivor)[0].kill()
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    link.add(sent_request("lost", PROMPTS[0], params))
    with pytest.raises(LinkLostError):
        async with asyncio.timeout(END_TIMEOUT_S):
            async for _ in link.events():
                pass


async def wait_ended(processes: list[psutil.Process]) -> None:
    """What an instance started ends with it."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while left := [process for process in processes if is_alive(process)]:
        assert time.monotonic() < deadline_s, f"{left} outlived their instance"
        await asyncio.sleep(0.05)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
