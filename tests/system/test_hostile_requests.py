"""Law: malformed, costly and odd requests of all kinds cost the streams beside them neither life nor pace."""

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import pytest

from tests.support.application import Application, ready
from tests.support.effort import is_long
from tests.support.hostile import hostile_requests
from tests.support.hostile_sending import HostileRequest, send
from tests.support.speed import slowness
from tests.support.streams import make_prompts

pytestmark = [pytest.mark.slow, pytest.mark.shapes, pytest.mark.timeout(3000)]

NUM_STREAMS = 16
MAX_TOKENS = 300
NUM_HOSTILE = 10_000 if is_long() else 600
NUM_AT_ONCE = 16
SEED = 20
ANSWER_TIMEOUT_S = 120.0
MORE_SILENCE_S = 1.0  # than the same streams without hostile requests


@dataclass
class Honest:
    """A greedy stream that begins again when it has ended, until it is told to stop."""

    prompt: list[int]
    answers: list[list[int]] = field(default_factory=list)
    longest_silence_s: float = 0.0

    async def run(self, http: httpx.AsyncClient, model: str, stopping: asyncio.Event) -> None:
        body = {"model": model, "prompt": self.prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        while not stopping.is_set():
            tokens: list[int] = []
            last_s = time.monotonic()
            async with http.stream("POST", "/v1/completions", json=body, timeout=ANSWER_TIMEOUT_S) as response:
                assert response.status_code == 200, await response.aread()
                async for line in response.aiter_lines():
                    now_s = time.monotonic()
                    self.longest_silence_s = max(self.longest_silence_s, now_s - last_s)
                    last_s = now_s
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        assert "error" not in chunk, chunk
                        tokens += chunk["choices"][0].get("token_ids") or []
            self.answers.append(tokens)


async def attack(application: Application, requests: list[HostileRequest]) -> Counter[tuple[str, int | None]]:
    """Sends all of them, some at once; how often each kind got each status."""
    statuses: Counter[tuple[str, int | None]] = Counter()
    pending = iter(requests)

    async def sender() -> None:
        for request in pending:
            status = await send("127.0.0.1", application.port, request, ANSWER_TIMEOUT_S)
            statuses[request.kind, status] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(sender())
    return statuses


async def stream_beside(application: Application, requests: list[HostileRequest]) -> tuple[list[Honest], Counter]:
    """Honest streams while `requests` are sent, or for one answer each where there are none."""
    honest = [Honest(prompt) for prompt in make_prompts(NUM_STREAMS, seed=6)]
    stopping = asyncio.Event()
    async with (
        httpx.AsyncClient(base_url=application.url, limits=httpx.Limits(max_connections=NUM_STREAMS)) as http,
        asyncio.TaskGroup() as group,
    ):
        for stream in honest:
            group.create_task(stream.run(http, application.model_name, stopping))
        statuses = await attack(application, requests)
        stopping.set()
    return honest, statuses


async def test_honest_streams_go_on_beside_hostile_requests(application: Application) -> None:
    before = ready(application.wait_ready())
    undisturbed, _ = await stream_beside(application, [])
    alone_s = max(stream.longest_silence_s for stream in undisturbed)

    honest, statuses = await stream_beside(application, list(hostile_requests(SEED, NUM_HOSTILE)))
    print(f"\n  silence {alone_s:.2f} s alone, {max(s.longest_silence_s for s in honest):.2f} s under attack")
    for (kind, status), count in sorted(statuses.items(), key=str):
        print(f"  {kind:14} {status}  {count}")

    for stream, expected in zip(honest, undisturbed, strict=True):
        assert all(answer == expected.answers[0] for answer in stream.answers)
        assert stream.longest_silence_s <= alone_s + MORE_SILENCE_S * slowness()
    assert not [status for _, status in statuses if status is not None and status >= 500], statuses
    assert statuses.total() == NUM_HOSTILE
    assert ready(application.wait_ready()) == before, "no instance died"
