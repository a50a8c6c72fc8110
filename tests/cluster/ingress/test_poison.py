"""A request that kills the real instances which compute it ends two of them, and the streams beside it go on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.support import poisoned_host
from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.poisoned_host import POISON
from tests.support.processes import InstanceProcess, start_instances

pytestmark = [pytest.mark.slow, pytest.mark.shapes]

MODEL = "tiny"
NUM_TOKENS = 200
PROMPT = [3, 4, 5]


@pytest.fixture
def mortals(model: Path) -> Iterator[list[InstanceProcess]]:
    processes = start_instances(model, [0, 1, 2], module=poisoned_host.__name__)
    yield processes
    for process in processes:
        process.kill()


async def test_a_killer_ends_two_instances_and_no_neighbour(mortals: list[InstanceProcess]) -> None:
    async def stream(client: openai.AsyncOpenAI, started: asyncio.Event) -> str:
        text = ""
        async for chunk in await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, stream=True
        ):
            text += chunk.choices[0].text
            started.set()
        return text

    poison = {"model": MODEL, "prompt": [3, POISON, 5], "max_tokens": 5}
    routes = FixedRoutes(mortals)
    with serving(ingress_config(mortals), routes) as url:
        wait_ready(url)
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100) as client,
            httpx.AsyncClient(base_url=url, timeout=100) as http,
        ):
            expected = await stream(client, asyncio.Event())
            started = asyncio.Event()
            neighbour = asyncio.create_task(stream(client, started))
            await asyncio.wait_for(started.wait(), 100)

            answer = await http.post("/v1/completions", json=poison)
            assert answer.status_code == 400, answer.text
            assert answer.headers["x-should-retry"] == "false"
            assert "computed this request" in answer.json()["error"]["message"]
            assert await asyncio.wait_for(neighbour, 200) == expected

            again = await http.post("/v1/completions", json=poison)
            assert again.status_code == 400
            assert await stream(client, asyncio.Event()) == expected
    assert sum(process.process.poll() is None for process in mortals) == 1
