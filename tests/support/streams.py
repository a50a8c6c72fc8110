"""Greedy completion streams against a running application, with the token ids they were made of."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

TIMEOUT_S = 300.0


@dataclass
class Stream:
    """One streamed completion: what came, and how it ended."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str = ""
    done: bool = False


def make_prompts(count: int, *, seed: int = 0, longest: int = 200) -> list[list[int]]:
    """Token id prompts of mixed lengths."""
    generator = random.Random(seed)
    return [[generator.randrange(10, 500) for _ in range(generator.randrange(4, longest))] for _ in range(count)]


async def stream_completion(
    http: httpx.AsyncClient, model: str, prompt: Sequence[int], max_tokens: int, *, into: Stream | None = None
) -> Stream:
    """One greedy streamed completion; `into` can be watched. Errors are noted, not raised: a test counts them."""
    result = into if into is not None else Stream()
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    try:
        async with http.stream("POST", "/v1/completions", json=body, timeout=TIMEOUT_S) as response:
            if response.status_code != 200:
                result.error = f"{response.status_code}: {(await response.aread())[:300]!r}"
                return result
            async for line in response.aiter_lines():
                _take(result, line)
    except httpx.HTTPError as error:
        result.error = f"{type(error).__name__}: {error}"
    return result


async def stream_all(url: str, model: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Stream]:
    """All prompts at once."""
    limits = httpx.Limits(max_connections=len(prompts))
    async with httpx.AsyncClient(base_url=url, limits=limits) as http:
        return await asyncio.gather(*(stream_completion(http, model, prompt, max_tokens) for prompt in prompts))


def _take(result: Stream, line: str) -> None:
    if not line.startswith("data: "):
        return
    if line == "data: [DONE]":
        result.done = True
        return
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        result.error = str(chunk["error"])
        return
    for choice in chunk["choices"]:
        result.text += choice["text"]
        result.token_ids += choice.get("token_ids") or []
        result.finish_reason = choice["finish_reason"] or result.finish_reason
