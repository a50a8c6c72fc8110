"""Thousands of malformed requests, made from good ones by mutation: every answer is in shape, and nothing breaks."""

import asyncio
import copy
import json
import os
import random
from typing import Any

import httpx
import pytest

from tests.support.processes import InstanceProcess

NUM_REQUESTS = int(os.environ.get("PENGSERVE_MALFORMED_REQUESTS", "2000"))
NUM_AT_ONCE = 16
SEED = int(os.environ.get("PENGSERVE_MALFORMED_SEED", "20261"))

pytestmark = pytest.mark.slow

CHAT = {
    "model": "tiny",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
    "max_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "n": 1,
    "seed": 1,
    "stop": ["zz"],
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1.0},
    "frequency_penalty": 0.1,
    "presence_penalty": 0.1,
    "stream": False,
    "user": "u",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "stream_options": None,
    "stop_token_ids": [3],
    "min_tokens": 1,
    "allowed_token_ids": None,
    "bad_words": ["no"],
    "repetition_penalty": 1.1,
    "top_k": 5,
    "min_p": 0.01,
    "priority": 0,
    "cache_salt": "x",
    "chat_template_kwargs": {},
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "structured_outputs": None,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "documents": None,
    "reasoning_effort": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "return_token_ids": False,
    "stream_interval": None,
}
COMPLETION = {
    **{k: v for k, v in CHAT.items() if k not in ("messages", "tools", "tool_choice", "top_logprobs", "documents")},
    "prompt": "hello",
    "logprobs": 2,
    "echo": False,
    "best_of": None,
    "suffix": None,
    "logprob_token_ids": None,
}
RESPONSES = {
    "model": "tiny",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "instructions": "x",
    "max_output_tokens": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "stream": False,
    "store": False,
    "tools": [],
    "tool_choice": "auto",
    "include": [],
    "metadata": {"a": "b"},
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
    "previous_response_id": None,
    "reasoning": None,
    "background": False,
    "top_logprobs": 0,
    "parallel_tool_calls": True,
    "service_tier": "auto",
    "prompt": None,
}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSES,
    "/tokenize": {"model": "tiny", "prompt": "hi", "add_special_tokens": True, "return_token_strs": False},
    "/detokenize": {"model": "tiny", "tokens": [5, 6]},
}
JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 17, 10**6, 2**31, 2**31 - 1, -(2**31), 2**63, 2**64, -(2**63), 10**40, 0.0, -0.5,
    1.5, 1e-300, 1e300, -1e300, "", " ", "x", "1", "null", "NaN", "\x00", "\u202e", "\ufffd", "🦜" * 40, "a" * 5000,
    "<|im_start|>", "{{ 7 * 7 }}", "../../etc/passwd", "http://127.0.0.1:1/", "data:image/png;base64,AAAA", [], [[]],
    [None], [1, "a", None], [[1, 2], ["a"]], [{}], {}, {"": None}, {"a": {"b": {"c": [1, {"d": None}]}}},
    [-1], [10**12], [511, 512], ["a"] * 200, [0] * 3000, {"type": "json_object"}, {"type": "json_schema"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/missing"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "maxLength": 10**9}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(a{900}){900}"}}},
    {"type": "structural_tag", "structures": [], "triggers": []}, {"regex": "("}, {"regex": "a{1,99999999}"},
    {"regex": "[a-z]+"}, {"choice": []}, {"choice": ["a", "b"]}, {"grammar": "root ::= "}, {"json": "{"},
    {"json": {"type": "object"}, "regex": "a"}, {"include_usage": True}, {"effort": "high"}, {"10000000": 5},
    {"-1": 5}, {"a": 5}, {"5": 1e300}, "auto", "required", "none", {"type": "function", "function": {"name": "g"}},
    [{"type": "function"}], [{"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:1/"}],
    [{"type": "code_interpreter", "container": {"type": "auto"}}], [{"type": "web_search"}],
    [{"role": "user"}], [{"role": "nobody", "content": "x"}], [{"role": "user", "content": None}],
    [{"role": "assistant", "tool_calls": [{"id": 1}]}], [{"role": "tool", "content": "x"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}],
    [{"role": "user", "content": [{"type": "video"}]}], [{"role": "user", "content": [{"type": "text"}]}],
    [{"type": "function_call_output", "call_id": "x", "output": "y"}], [{"type": "item_reference", "id": "x"}],
    [{"type": "reasoning", "id": "x", "summary": []}], {"id": "p", "variables": {}}, {"max_pattern_size": 10**9},
]  # fmt: skip
RAW = [
    b"", b"{", b"[]", b"null", b"5", b'"x"', b"{}", b'{"model": NaN}', b'{"a": Infinity}', b'{"n": 1e999}',
    b"[" * 100_000, b'{"a":' * 500 + b"1" + b"}" * 500, b'{"n": ' + b"9" * 6000 + b"}", b"\xff\xfe{}", b"\x00\x01",
    b'{"model": "tiny", "prompt": "\\ud800"}', b'{"messages": [{"role": "user", "content": "\\udfff"}]}',
    b'{"model": "tiny", "prompt": "\xc3\x28"}', b"model=tiny", b"{'model': 'tiny'}",
]  # fmt: skip
HEADERS: list[dict[str, str]] = [
    {}, {}, {}, {}, {}, {}, {"content-type": "text/plain"}, {"content-type": ""}, {"x-request-id": "a b\tc"},
    {"x-request-id": "z" * 4000}, {"x-data-parallel-rank": "99"}, {"x-vllm-priority": "9" * 400},
    {"x-session-id": "s" * 2000}, {"authorization": "Bearer"}, {"accept-encoding": "zstd"},
]  # fmt: skip
FOREIGN_FIELDS = ["", "x", "__proto__", "chat_template", "prompt_embeds", "kv_transfer_params", "vllm_xargs"]
MODELS = ["", "tiny ", "TINY", "../tiny", "gpt-4", "tiny\x00", "\U0001f99c", "m" * 3000]


def mutate(random_: random.Random, body: dict[str, Any]) -> Any:
    """`body` with one to three faults, at any depth."""
    body = copy.deepcopy(body)
    for _ in range(random_.randint(1, 3)):
        places = list(walk(body))
        holder, key = random_.choice(places) if random_.random() < 0.4 else (body, random_.choice(list(body) or ["n"]))
        match random_.randrange(6):
            case 0 if key in holder or isinstance(holder, list):
                del holder[key]
            case 1:
                body["model"] = random_.choice(MODELS)
            case 2 if isinstance(holder, dict):
                holder[
                    random_.choice(["", "x", "__proto__", "chat_template", "prompt_embeds", "kv_transfer_params"])
                ] = random_.choice(JUNK)
            case _:
                holder[key] = copy.deepcopy(random_.choice(JUNK))
        if not body:
            break
    return body


def walk(value: Any) -> Any:
    """Every (container, key) below `value`."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in list(items):
        yield value, key
        yield from walk(child)


def make_request(random_: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    path = random_.choice(list(BODIES))
    headers = {"content-type": "application/json", **random_.choice(HEADERS)}
    if random_.random() < 0.1:
        return random_.choice(["POST", "PUT", "GET", "DELETE"]), path, random_.choice(RAW), headers
    body = mutate(random_, BODIES[path])
    return "POST", path, json.dumps(body, ensure_ascii=random_.random() < 0.5).encode("utf-8", "replace"), headers


def check(answer: httpx.Response, request: object) -> None:
    """The law of every answer."""
    about = f"{request!r:.1500} -> {answer.status_code} {answer.text[:500]}"
    assert answer.status_code < 500, about
    assert answer.headers.get("x-request-id"), about
    if answer.status_code < 400:
        assert '"code":5' not in answer.text.replace(" ", ""), about  # a stream that ended in a server error
        return
    error = answer.json()["error"]
    assert isinstance(error["message"], str) and error["message"], about
    assert set(error) == {"message", "type", "param", "code"}, about
    assert error["code"] == answer.status_code != 422, about
    assert len(answer.text) < 2000, about
    for leak in ("Traceback", "site-packages", 'File "', " object at 0x"):
        assert leak not in answer.text, about


async def test_malformed_requests_get_an_answer_in_shape_and_break_nothing(
    ingress: str, instances: list[InstanceProcess]
) -> None:
    random_ = random.Random(SEED)
    statuses: dict[int, int] = {}
    failures: list[str] = []
    async with httpx.AsyncClient(base_url=ingress, timeout=60, trust_env=False) as http:
        before = (await http.post("/v1/completions", json=GOOD)).json()["choices"][0]["text"]
        queue = [make_request(random_) for _ in range(NUM_REQUESTS)]

        async def send_some() -> None:
            while queue:
                method, path, body, headers = request = queue.pop()
                answer = await http.request(method, path, content=body, headers=headers)
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                try:
                    check(answer, request)
                except AssertionError as failure:
                    failures.append(str(failure))

        await asyncio.gather(*(send_some() for _ in range(NUM_AT_ONCE)))
        assert not failures, f"{len(failures)} of {NUM_REQUESTS}; statuses {statuses}\n" + "\n\n".join(failures[:12])
        assert all(process.process.poll() is None for process in instances)
        after = (await http.post("/v1/completions", json=GOOD)).json()["choices"][0]["text"]
        assert after == before
        assert (await http.get("/ready")).status_code == 200
    assert statuses.get(400, 0) > NUM_REQUESTS / 3, statuses
    assert statuses.get(404, 0) > 0, statuses


GOOD = {"model": "tiny", "prompt": "hello", "max_tokens": 20, "temperature": 0}
