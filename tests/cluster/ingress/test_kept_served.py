"""Real answers with an SLO: what `usage.pengserve` says, and that a paced stream has the tokens of one that is not."""

import json
import time
from typing import Any

import httpx
import openai
import pytest

from pengserve.client import AsyncPengServe, PengServe, Slo, kept_of
from tests.support.ingress import MODEL_NAME

pytestmark = pytest.mark.slow

CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "count with me"}], "temperature": 0}
KEYS = {"ttft_ms", "tbt_p99_ms", "paused_ms", "slo_met"}
EASY = {"ttft_ms": 600_000, "tbt_ms": 60_000}


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[list[tuple[float, dict[str, Any]]], float]:
    """(seconds since the request, chunk) of a stream, and when its last byte came."""
    started_s, chunks = time.monotonic(), []
    with http.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                chunks.append((time.monotonic() - started_s, json.loads(line[6:])))
    return chunks, time.monotonic() - started_s


def told(usage: dict[str, Any]) -> dict[str, Any]:
    found = usage["pengserve"]
    assert set(found) == KEYS and found["paused_ms"] == 0
    return dict(found)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 8}),
        ("/v1/completions", {"model": MODEL_NAME, "prompt": "count", "max_tokens": 8}),
        ("/v1/responses", {"model": MODEL_NAME, "input": "count", "max_output_tokens": 8}),
    ],
)
def test_an_answer_tells_what_was_kept_where_it_was_asked_for(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    plain = http.post(path, json=body).json()
    assert "pengserve" not in plain["usage"], "without an SLO nothing changes"
    easy = http.post(path, json=body | {"slo": EASY}).json()
    found = told(easy["usage"])
    assert found["slo_met"] is True and found["ttft_ms"] > 0 and found["tbt_p99_ms"] > 0
    hard = http.post(path, json=body | {"slo": {"ttft_ms": 1, "tbt_ms": 1}}).json()
    assert told(hard["usage"])["slo_met"] is False, "it is served all the same"
    assert hard["usage"]["total_tokens"] == plain["usage"]["total_tokens"]


def test_a_stream_tells_it_in_its_last_chunk(http: httpx.Client) -> None:
    body = CHAT | {"max_completion_tokens": 8, "slo": EASY, "stream_options": {"include_usage": True}}
    chunks, _ = stream(http, "/v1/chat/completions", body)
    assert told(chunks[-1][1]["usage"])["slo_met"] is True
    assert all(not chunk.get("usage") for _, chunk in chunks[:-1])
    responses, _ = stream(
        http, "/v1/responses", {"model": MODEL_NAME, "input": "count", "max_output_tokens": 8, "slo": EASY}
    )
    assert told(responses[-1][1]["response"]["usage"])["slo_met"] is True


def test_the_official_client_reads_it(client: openai.OpenAI) -> None:
    create: Any = client.chat.completions.create
    answer = create(**CHAT, max_completion_tokens=4, extra_body={"slo": EASY})
    assert answer.usage.pengserve["slo_met"] is True


async def test_our_clients_bring_an_slo_and_read_what_was_kept(ingress: str) -> None:
    easy, hard = Slo(ttft_ms=600_000, tbt_ms=60_000), {"slo": {"ttft_ms": 1}}
    with PengServe(ingress) as cluster, cluster.openai(slo=easy, max_retries=0) as client:
        create: Any = client.chat.completions.create
        kept = kept_of(create(**CHAT, max_completion_tokens=4))
        assert kept is not None and kept.slo_met and kept.ttft_ms and kept.tbt_p99_ms and kept.paused_ms == 0
        own = kept_of(create(**CHAT, max_completion_tokens=4, extra_body=hard))
        assert own is not None and not own.slo_met
        chunks = list(create(**CHAT, max_completion_tokens=4, stream=True, stream_options={"include_usage": True}))
        last = kept_of(chunks[-1])
        assert last is not None and last.slo_met
        answer = client.responses.create(model=MODEL_NAME, input="count", max_output_tokens=4)
        assert kept_of(answer) is not None
        events = list(client.responses.create(model=MODEL_NAME, input="count", max_output_tokens=4, stream=True))
        assert kept_of(events[-1]) is not None
        assert client.models.list().data
    with PengServe(ingress) as cluster, cluster.openai(max_retries=0) as plain:
        create = plain.chat.completions.create
        assert kept_of(create(**CHAT, max_completion_tokens=4)) is None
    async with AsyncPengServe(ingress) as remote, remote.openai(slo=easy, max_retries=0) as asking:
        asked: Any = asking.completions.create
        kept = kept_of(await asked(model=MODEL_NAME, prompt="count", max_tokens=4))
        assert kept is not None and kept.slo_met


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1.0}, {"logprobs": True, "top_logprobs": 2}])
def test_a_paced_stream_has_the_same_tokens_later(http: httpx.Client, more: dict[str, Any]) -> None:
    num_tokens, interval_s = 24, 0.04
    body = CHAT | {"max_completion_tokens": num_tokens, "stream_options": {"include_usage": True}, "seed": 1} | more
    plain, plain_s = stream(http, "/v1/chat/completions", body)
    slo = {"tbt_ms": interval_s * 1e3, "pacing": "steady"}
    paced, paced_s = stream(http, "/v1/chat/completions", body | {"slo": slo})

    def texts(chunks: list[tuple[float, dict[str, Any]]]) -> dict[int, tuple[str, list[Any], list[Any]]]:
        found: dict[int, tuple[str, list[Any], list[Any]]] = {}
        for _, chunk in chunks:
            for choice in chunk["choices"]:
                text, logprobs, ends = found.get(choice["index"], ("", [], []))
                more_logprobs = (choice.get("logprobs") or {}).get("content") or []
                end = [choice["finish_reason"]] if choice.get("finish_reason") else []
                text += choice["delta"].get("content") or ""
                found[choice["index"]] = text, [*logprobs, *[p["token"] for p in more_logprobs]], [*ends, *end]
        return found

    assert texts(paced) == texts(plain)
    usage = paced[-1][1]["usage"]
    assert usage["completion_tokens"] == plain[-1][1]["usage"]["completion_tokens"]
    if plain_s < num_tokens * interval_s / 2:  # this machine computes faster than the pace
        assert paced_s < num_tokens * interval_s, "the answer was finished before, and then came at once"
        assert told(usage)["slo_met"] is True


def test_stop_strings_and_whole_answers_wait_for_no_pace(http: httpx.Client) -> None:
    slo = {"tbt_ms": 60_000, "pacing": "steady"}
    body = CHAT | {"max_completion_tokens": 16}
    started_s = time.monotonic()
    whole = http.post("/v1/chat/completions", json=body | {"slo": slo})
    assert whole.status_code == 200
    text = whole.json()["choices"][0]["message"]["content"]
    chunks, _ = stream(http, "/v1/chat/completions", body | {"slo": slo})
    assert "".join(c["choices"][0]["delta"].get("content") or "" for _, c in chunks if c["choices"]) == text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    stopped, _ = stream(http, "/v1/chat/completions", body | {"slo": slo, "stop": [stop]})
    seen = "".join(c["choices"][0]["delta"].get("content") or "" for _, c in stopped if c["choices"])
    assert seen == text[: text.index(stop)]
    assert time.monotonic() - started_s < 55, "one token a minute holds nothing that is finished"


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NAMED = {"type": "function", "function": {"name": "weather"}}


def calls(chunks: list[tuple[float, dict[str, Any]]]) -> tuple[dict[int, tuple[str, str]], str, list[str]]:
    """Of a stream: name and arguments of each tool call, the text beside them, and why it ended."""
    found: dict[int, tuple[str, str]] = {}
    text, ends = "", []
    for choice in (choice for _, chunk in chunks for choice in chunk["choices"]):
        for part in choice["delta"].get("tool_calls") or ():
            name, arguments = found.get(part["index"], ("", ""))
            function = part.get("function") or {}
            more = function.get("name") or "", function.get("arguments") or ""
            found[part["index"]] = name + more[0], arguments + more[1]
        text += choice["delta"].get("content") or ""
        ends += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return found, text, ends


@pytest.mark.parametrize("choice", [NAMED, "required", "auto"])
def test_tool_calls_are_the_same_in_a_paced_stream(
    http: httpx.Client, no_blanks: dict[str, int], choice: dict[str, Any] | str
) -> None:
    body = CHAT | {"tools": [TOOL], "tool_choice": choice, "max_completion_tokens": 60, "logit_bias": no_blanks}
    plain, _ = stream(http, "/v1/chat/completions", body)
    paced, _ = stream(http, "/v1/chat/completions", body | {"slo": {"tbt_ms": 15, "pacing": "steady"}})
    assert calls(paced) == calls(plain)
    if choice != "auto":
        [(name, arguments)] = calls(plain)[0].values()
        assert name == "weather" and json.loads(arguments)["city"] in ("Oslo", "Rome")
    started_s = time.monotonic()
    one = {"tbt_ms": 60_000, "pacing": "steady"}  # a token in a minute
    slow, _ = stream(http, "/v1/chat/completions", body | {"slo": one})
    assert calls(slow) == calls(plain)
    whole = [http.post("/v1/chat/completions", json=body | more).json()["choices"][0] for more in ({}, {"slo": one})]
    asked = [[call["function"] for call in choice["message"].get("tool_calls") or ()] for choice in whole]
    assert asked[0] == asked[1] and whole[0]["finish_reason"] == whole[1]["finish_reason"]
    assert time.monotonic() - started_s < 55, "a call that is complete waits for no pace"
