"""Streams that run in the background while a test does something to the cluster."""

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 120.0


@dataclass
class TimedStream:
    """One streamed completion: token ids with the time each chunk came, and how it ended."""

    token_ids: list[int] = field(default_factory=list)  # as they came, of all choices
    by_choice: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)  # of the tokens, where they were asked for
    times_s: list[float] = field(default_factory=list)
    started_s: float = 0.0
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)  # with `stream_options: {"include_usage": true}`
    error: str = ""

    @property
    def longest_gap_s(self) -> float:
        """Longest wait between two chunks."""
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)


class Traffic:
    """A client of its own thread and connection pool."""

    def __init__(self, url: str, model: str = "tiny") -> None:
        self.url, self._model = url, model
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="traffic", daemon=True)
        self._thread.start()
        # Servers close a connection that is idle for 5 s; one that is used again just then is reset.
        limits = httpx.Limits(max_connections=256, keepalive_expiry=2.0)
        self._http = httpx.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT_S)

    def __enter__(self) -> "Traffic":
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._http.aclose(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def start(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        headers: Mapping[str, str] | None = None,
        into: TimedStream | None = None,
        **params: Any,
    ) -> "Future[TimedStream]":
        """Begins a streamed completion; greedy unless `params` say otherwise. `into` shows it as it comes."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **params,
        }
        return asyncio.run_coroutine_threadsafe(
            self._stream(body, dict(headers or {}), into or TimedStream()), self._loop
        )

    async def _stream(self, body: dict[str, Any], headers: dict[str, str], result: TimedStream) -> TimedStream:
        result.started_s = time.monotonic()
        try:
            async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                if response.status_code != 200:
                    result.error = f"{response.status_code}: {(await response.aread())[:300]!r}"
                    return result
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        _take(result, json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            result.error = f"{type(error).__name__}: {error}"
        return result


def _take(result: TimedStream, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        result.error = str(chunk["error"])
        return
    result.usage = chunk.get("usage") or result.usage
    for choice in chunk.get("choices", ()):
        if choice.get("token_ids"):
            result.token_ids += choice["token_ids"]
            result.by_choice.setdefault(choice.get("index", 0), []).extend(choice["token_ids"])
            result.times_s.append(time.monotonic())
            result.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
        result.finish_reason = choice.get("finish_reason") or result.finish_reason
