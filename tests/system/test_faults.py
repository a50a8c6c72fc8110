"""Law: whatever process dies, no stream ends in an error and every greedy token is the one it would have been."""

import asyncio
import os
import random
import signal
import time

import pytest

from pengserve.planners.types.events import EventKind
from tests.support.application import Application, kill, ready
from tests.support.effort import is_long
from tests.support.streams import Stream, make_prompts, stream_all, stream_completion

pytestmark = pytest.mark.slow

NUM_STREAMS = 16
NUM_KILLS = 20 if is_long() else 4
MAX_TOKENS = 700
KILL_TIMEOUT_S = 420.0


def assert_equal(streams: list[Stream], expected: list[Stream]) -> None:
    assert [stream.error for stream in streams] == [""] * len(streams)
    for stream, undisturbed in zip(streams, expected, strict=True):
        assert stream.done
        assert stream.token_ids == undisturbed.token_ids
        assert (stream.text, stream.finish_reason) == (undisturbed.text, undisturbed.finish_reason)


async def undisturbed_streams(application: Application, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
    streams = await stream_all(application.url, application.model_name, prompts, max_tokens)
    assert [stream.error for stream in streams] == [""] * len(streams)
    assert all(len(stream.token_ids) == max_tokens for stream in streams)
    return streams


@pytest.mark.shapes
async def test_streams_survive_kills_of_instances(application: Application) -> None:
    prompts = make_prompts(NUM_STREAMS, seed=1)
    application.wait_ready()
    expected = await undisturbed_streams(application, prompts, MAX_TOKENS)
    chance = random.Random(7)
    kills = 0
    finished: list[tuple[int, Stream]] = []
    stopping = asyncio.Event()

    async def keep_streaming(which: int) -> None:
        import httpx

        async with httpx.AsyncClient(base_url=application.url) as http:
            while not stopping.is_set():
                stream = await stream_completion(http, application.model_name, prompts[which], MAX_TOKENS)
                finished.append((which, stream))

    streaming = [asyncio.create_task(keep_streaming(which)) for which in range(NUM_STREAMS)]
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    try:
        while kills < NUM_KILLS:
            assert time.monotonic() < deadline_s, f"only {kills} kills in {KILL_TIMEOUT_S:g} s"
            snapshot = await asyncio.to_thread(application.snapshot)
            pids = ready(snapshot) if snapshot else []
            # One is killed whenever one is ready, alone or not: with none left, requests wait for the next.
            if pids:
                await asyncio.sleep(chance.uniform(0.05, 1.5))
                kill(chance.choice(pids))
                kills += 1
            await asyncio.sleep(0.2)
    finally:
        stopping.set()
        async with asyncio.timeout(KILL_TIMEOUT_S):
            await asyncio.gather(*streaming)
    assert len(finished) >= NUM_STREAMS
    assert_equal([stream for _, stream in finished], [expected[which] for which, _ in finished])
    application.wait_ready()
    assert "requests go on elsewhere" in application.ingress_log()


async def test_sigterm_of_an_instance_moves_its_requests(application: Application) -> None:
    """As before a node stops: its actor drains, ends, and is replaced."""
    prompts = make_prompts(NUM_STREAMS, seed=3)
    before = application.wait_ready()
    expected = await undisturbed_streams(application, prompts, MAX_TOKENS)
    known = application.client.events(limit=1000)[-1].seq
    running = asyncio.create_task(stream_all(application.url, application.model_name, prompts, MAX_TOKENS))
    await asyncio.sleep(0.5)
    leaving = before.instances[1]
    os.kill(leaving.device.pid, signal.SIGTERM)
    late = asyncio.create_task(stream_all(application.url, application.model_name, prompts, MAX_TOKENS))
    assert_equal(await running, expected)
    assert_equal(await late, expected)
    after = await asyncio.to_thread(application.wait_ready)
    assert leaving.device.pid not in ready(after)
    kinds = [e.kind for e in application.client.events(after=known) if e.span == f"instance:{leaving.key}"]
    assert kinds == [EventKind.INSTANCE_DRAIN_START, EventKind.INSTANCE_DRAIN_END]


async def test_death_of_the_controller_disturbs_nobody(application: Application) -> None:
    prompts = make_prompts(NUM_STREAMS, seed=2)
    before = application.wait_ready()
    expected = await undisturbed_streams(application, prompts, MAX_TOKENS)
    running = asyncio.create_task(stream_all(application.url, application.model_name, prompts, MAX_TOKENS))
    await asyncio.sleep(0.3)
    kill(application.pid_of("ray::ControllerActor"))
    late = asyncio.create_task(stream_all(application.url, application.model_name, prompts, MAX_TOKENS))
    assert_equal(await running, expected)
    assert_equal(await late, expected)
    after = await asyncio.to_thread(application.wait_ready)
    assert after.controller_started_s > before.controller_started_s
    assert ready(after) == ready(before), "the new controller did not adopt the running instances"
