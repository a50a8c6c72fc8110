"""Constraints that no text meets are the fault of the client; those that some text meets are met."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

LATE = {"grammar": 'root ::= "abc" tail\ntail ::= tail "b"'}
EMPTY = [  # no token is allowed: at once, or after some
    {"grammar": 'root ::= root "a"'},
    {"grammar": "root ::= root"},
    LATE,
    {"regex": r"[^\s\S]"},
    {"json": {"$ref": "#"}},
]
UNSUPPORTED = [  # xgrammar does not take them; vLLM's other libraries would
    {"regex": "a**"},
    {"json": {"allOf": [{"type": "string"}, {"enum": ["yes", "no"]}]}},
]


def ask(http: httpx.Client, guide: dict[str, Any], **options: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 30, "structured_outputs": guide, **options}
    return http.post("/v1/completions", json=body)


def require_400(error: dict[str, Any]) -> None:
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert re.fullmatch(r"[A-Z][^.]*\.", error["message"]), f"one sentence: {error['message']}"


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "n": 2}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("guide", EMPTY, ids=str)
def test_a_constraint_that_no_text_meets_is_refused(
    http: httpx.Client, guide: dict[str, Any], options: dict[str, Any]
) -> None:
    answer = ask(http, guide, **options)
    assert answer.status_code == 400, answer.text
    require_400(answer.json()["error"])


def test_a_stream_ends_with_the_same_refusal(http: httpx.Client) -> None:
    answer = ask(http, LATE, stream=True, temperature=0)
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
    assert "abc".startswith(text)
    require_400(chunks[-1]["error"])


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= root "a" | "a"', "a+"),
        ('root ::= tail "a"\ntail ::= root "a" | "a"', "(aa)+"),
        ('root ::= "" | root "aa"', "(aa)*"),
    ],
)
def test_a_left_recursive_grammar_that_ends_is_met(http: httpx.Client, grammar: str, pattern: str) -> None:
    answer = ask(http, {"grammar": grammar}, temperature=0, min_tokens=6)
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(pattern, answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("guide", UNSUPPORTED, ids=str)
def test_what_the_backend_cannot_guide_is_refused_and_not_guided_by_another(
    http: httpx.Client, guide: dict[str, Any]
) -> None:
    answer = ask(http, guide)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "BadRequestError"


def test_a_grammar_that_costs_too_much_time_ends_its_request_and_no_other(http: httpx.Client) -> None:
    honest = {"model": "tiny", "prompt": "hello", "max_tokens": 200, "temperature": 0}
    expected = http.post("/v1/completions", json=honest).json()["choices"][0]["text"]
    costly = {"grammar": 'root ::= a\na ::= a a | a b | b a | ""\nb ::= "x" b | a | "a"'}  # 0.4 s for the 200th token
    with ThreadPoolExecutor(9) as pool:
        honest_ones = [pool.submit(http.post, "/v1/completions", json=honest) for _ in range(8)]
        answer = ask(http, costly, temperature=0, max_tokens=600, min_tokens=600)
        texts = [one.result(60).json()["choices"][0]["text"] for one in honest_ones]
    assert answer.status_code == 400, answer.text
    require_400(answer.json()["error"])
    assert "too much time" in answer.json()["error"]["message"]
    assert texts == [expected] * 8
