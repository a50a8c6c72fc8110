"""Requests whose answers a grammar guides, of every kind: what they ask, what their answers must be, and a client."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from transformers import AutoTokenizer

from tests.support.ingress import MODEL_NAME
from tests.support.streams import make_prompts

MAX_TOKENS = 110  # more than what is guided has, but for further tool calls
TIMEOUT_S = 120.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{4,9}$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
CHOICES = ["the quick brown fox", "the quiet brook", "a slow red hen", "an old grey owl"]
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA, "strict": True}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@dataclass
class Answer:
    """What came of one request, whether it was streamed or not."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    arguments: str = ""  # of the first tool call
    finish_reason: str | None = None
    error: str = ""


@dataclass(frozen=True)
class GuidedRequest:
    """A request and the law of its answer."""

    kind: str
    path: str
    body: dict[str, Any]
    is_met: Callable[[Answer], bool]

    def check(self, answer: Answer, expected: Answer) -> None:
        """The answer is the undisturbed one, and what was asked for."""
        assert not answer.error, f"{self.kind}: {answer.error}"
        assert answer == expected, self.kind
        assert self.is_met(answer), f"{self.kind}: {answer}"


def guided_requests(model: Path) -> list[GuidedRequest]:
    """Two of each kind: one streamed, with a prompt of several chunks, and one not."""
    no_blanks = blanks(model)  # JSON allows any number of them, and the random model would write them for ever
    short, long = make_prompts(7, seed=5, longest=40), make_prompts(7, seed=6, longest=300)
    made: list[GuidedRequest] = []
    for prompts, is_streamed in ((short, False), (long, True)):
        common = {"model": MODEL_NAME, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
        common |= {"stream": is_streamed, "logit_bias": no_blanks}
        for i, (kind, guide, is_met) in enumerate(_completions()):
            body = {**common, "logit_bias": None, "prompt": prompts[i], "structured_outputs": guide}
            made.append(GuidedRequest(kind, "/v1/completions", body, is_met))
        for i, (kind, guide, is_met) in enumerate(_chats()):
            text = " ".join(map(str, prompts[4 + i][:60]))
            body = {**common, "messages": [{"role": "user", "content": text}], **guide}
            made.append(GuidedRequest(kind, "/v1/chat/completions", body, is_met))
    return made


def blanks(model: Path) -> dict[str, int]:
    """A logit bias against blanks."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    return {str(i): -100 for i in range(len(tokenizer)) if not tokenizer.decode([i]).strip()}


def _completions() -> list[tuple[str, dict[str, Any], Callable[[Answer], bool]]]:
    def matches(pattern: str) -> Callable[[Answer], bool]:
        return lambda answer: re.fullmatch(pattern, answer.text) is not None

    digits, words = "[0-9]{50}", "(([a-f]{3}|[u-z]{2})[0-9] ){8}"
    return [
        ("regex of digits", {"regex": digits}, matches(digits)),
        ("regex of words", {"regex": words}, matches(words)),
        ("choice", {"choice": CHOICES}, lambda answer: answer.text in CHOICES),
        (
            "grammar",
            {"grammar": 'root ::= (pair ","){9} "."\npair ::= "(" [a-m] item ")"\nitem ::= [0-9] | "<" item ">"'},
            matches(r"(\([a-m]<*[0-9]>*\),){9}\."),
        ),
    ]


def _chats() -> list[tuple[str, dict[str, Any], Callable[[Answer], bool]]]:
    named = {"type": "function", "function": {"name": "paint"}}
    return [
        ("response_format", {"response_format": FORMAT}, lambda answer: _fits(answer.text)),
        ("named tool", {"tools": [TOOL], "tool_choice": named}, lambda answer: _fits(answer.arguments)),
        ("required tool", {"tools": [TOOL], "tool_choice": "required"}, lambda answer: _fits(answer.arguments)),
    ]


def _fits(text: str) -> bool:
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


class GuidedTraffic:
    """Sends guided requests in the background, all of a call at once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._threads = ThreadPoolExecutor(4, "guided")

    def start(self, requests: Sequence[GuidedRequest]) -> "Future[list[Answer]]":
        """Begins them; their answers in the same order."""
        return self._threads.submit(lambda: asyncio.run(self._ask_all(requests)))

    async def _ask_all(self, requests: Sequence[GuidedRequest]) -> list[Answer]:
        limits = httpx.Limits(max_connections=len(requests))
        async with httpx.AsyncClient(base_url=self._url, limits=limits, timeout=TIMEOUT_S) as http:
            return await asyncio.gather(*(self._ask(http, request) for request in requests))

    async def _ask(self, http: httpx.AsyncClient, request: GuidedRequest) -> Answer:
        answer = Answer()
        async with http.stream("POST", request.path, json=request.body) as response:
            if response.status_code != 200:
                answer.error = f"{response.status_code}: {(await response.aread())[:300]!r}"
            elif request.body["stream"]:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        _take(answer, json.loads(line.removeprefix("data: ")), "delta")
            else:
                _take(answer, json.loads(await response.aread()), "message")
        return answer


def _take(answer: Answer, chunk: dict[str, Any], name: str) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])
        return
    for choice in chunk["choices"]:
        message = choice.get(name) or {}
        answer.token_ids += choice.get("token_ids") or []
        answer.text += choice.get("text") or message.get("content") or ""
        for position, call in enumerate(message.get("tool_calls") or ()):
            if call.get("index", position) == 0:
                answer.arguments += call["function"].get("arguments") or ""
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
