"""Laws of several ingresses: a loss hurts no stream of any, and a drain asked of one is kept by all."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.application import Application, kill, ready
from tests.support.streams import make_prompts, stream_all

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

NUM_STREAMS = 16
TIMEOUT_S = 240.0


@pytest.fixture(scope="module")
def two_ingresses(model: Path) -> Iterator[Application]:
    running = Application(model, ingress_replicas=2)
    try:
        running.wait_ready()
        yield running
    finally:
        exit_code = running.stop()
    assert exit_code == 0


async def test_streams_of_both_survive_a_kill(two_ingresses: Application) -> None:
    prompts = make_prompts(NUM_STREAMS, seed=3)
    url, name = two_ingresses.url, two_ingresses.model_name
    expected = await stream_all(url, name, prompts, 600)
    running = asyncio.create_task(stream_all(url, name, prompts, 600))
    await asyncio.sleep(0.4)
    kill(ready(two_ingresses.wait_ready())[0])
    streams = await running
    assert [stream.error for stream in (*expected, *streams)] == [""] * 2 * NUM_STREAMS
    assert [stream.token_ids for stream in streams] == [stream.token_ids for stream in expected]


def test_a_drain_is_kept_by_both(two_ingresses: Application) -> None:
    two_ingresses.wait_ready()
    assert two_ingresses.client.drain(timeout_s=TIMEOUT_S)
    deadline_s = time.monotonic() + TIMEOUT_S
    in_a_row = 0  # the proxy asks one or the other: eight times the same answer is both of them
    while in_a_row < 8:
        assert time.monotonic() < deadline_s
        draining = httpx.get(f"{two_ingresses.url}/ready", timeout=5).json()["why"] == "draining"
        in_a_row = in_a_row + 1 if draining else 0
