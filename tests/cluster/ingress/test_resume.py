"""The death of an instance under running streams: no error, no token lost or repeated."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.ingress import FixedRoutes, ingress_config, serving, wait_ready
from tests.support.processes import InstanceProcess, start_instances

MODEL = "tiny"
NUM_TOKENS = 300
PROMPTS = ["hello", "def main(", "import os", "What is a list?"]

GUIDES = [  # of more tokens than are generated
    {"regex": "([a-f]{3}[0-9]{2} ){100}"},
    {"grammar": 'root ::= (("<" [a-z] ">") | [0-9]+ ";"){150}'},
    {"json": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 150, "maxItems": 150}},
]

pytestmark = pytest.mark.slow


@pytest.fixture
def doomed(model: Path) -> Iterator[InstanceProcess]:
    (process,) = start_instances(model, [2])
    yield process
    process.kill()


async def stream(client: openai.AsyncOpenAI, prompt: str, half_way: asyncio.Event | None = None, **options: object):
    texts: dict[int, str] = {}
    num_chunks = 0
    async for chunk in await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=NUM_TOKENS, stream=True, **options
    ):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
        num_chunks += 1
        if half_way is not None and num_chunks == 40:
            half_way.set()
    return texts


async def test_streams_go_on_when_their_instance_is_killed(
    instances: list[InstanceProcess], doomed: InstanceProcess
) -> None:
    routes = FixedRoutes([*instances, doomed])
    cases = [(prompt, {"temperature": 0}) for prompt in PROMPTS * 2]
    cases += [("hello", {"temperature": 1.0, "seed": 3}), ("hello", {"temperature": 1.0, "seed": 4, "n": 2})]
    cases += [("hello", {"temperature": 0, "frequency_penalty": 1.0, "logprobs": 2})]
    cases += [("hello", {"temperature": 0, "extra_body": {"structured_outputs": guide}}) for guide in GUIDES]
    with serving(ingress_config(instances), routes) as url:
        wait_ready(url)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100) as client:
            expected = [await stream(client, prompt, **options) for prompt, options in cases]
            started = [asyncio.Event() for _ in cases]
            running = [
                asyncio.create_task(stream(client, prompt, event, **options))
                for (prompt, options), event in zip(cases, started, strict=True)
            ]
            await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), 400)
            doomed.kill()
            assert await asyncio.wait_for(asyncio.gather(*running), 400) == expected
    assert doomed.snapshot.key in [key for key, _ in routes.lost]


async def test_requests_wait_while_there_is_no_instance(instances: list[InstanceProcess]) -> None:
    routes = FixedRoutes()
    with serving(ingress_config(instances), routes) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            waiting = asyncio.create_task(stream(client, "hello", temperature=0))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            routes.show(instances)
            assert len((await asyncio.wait_for(waiting, 200))[0]) > 0


async def test_an_instance_that_leaves_the_table_finishes_what_it_has(instances: list[InstanceProcess]) -> None:
    routes = FixedRoutes(instances[:1])
    with serving(ingress_config(instances), routes) as url:
        wait_ready(url)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            expected = await stream(client, "hello", temperature=0)
            started = asyncio.Event()
            running = asyncio.create_task(stream(client, "hello", started, temperature=0))
            await asyncio.wait_for(started.wait(), 200)
            routes.show(instances[1:])
            assert await asyncio.wait_for(running, 200) == expected
            assert await stream(client, "hello", temperature=0) == expected
    assert not routes.lost
