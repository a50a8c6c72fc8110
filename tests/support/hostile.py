"""Hostile requests of all kinds, made from a seed: malformed, costly, odd and half sent, for every route of an ingress.

    for request in hostile_requests(seed=7, count=10_000):
        status = await send(host, port, request, timeout_s=30)    # None: the server closed without an answer

The same seed and index give the same request. What a server accepts of them asks for a few tokens only.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.support.hostile_sending import HostileRequest
from tests.support.hostile_values import (
    BAD_HEADERS,
    COSTLY_GRAMMARS,
    COSTLY_PATTERNS,
    FOREIGN_FIELDS,
    HUGE_NUMBERS,
    MAX_TOKENS,
    MEDIA,
    NOT_JSON,
    ODD_TEXTS,
    OPTIONS,
    VOCAB_SIZE,
    WRONG_VALUES,
    Json,
    good_body,
)

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
GENERATION = (COMPLETIONS, CHAT, RESPONSES)

Random = random.Random


def hostile_requests(seed: int, count: int, kinds: tuple[str, ...] = ()) -> Iterator[HostileRequest]:
    """`count` requests of all kinds, or of these."""
    return (hostile_request(seed, index, kinds) for index in range(count))


def hostile_request(seed: int, index: int, kinds: tuple[str, ...] = ()) -> HostileRequest:
    """Request number `index` of a seed."""
    draw = random.Random(f"{seed}/{index}")
    chosen = kinds or tuple(KINDS)
    (kind,) = draw.choices(chosen, [KINDS[name][1] for name in chosen])
    return KINDS[kind][0](draw)._replace(kind=kind)


# Kinds --------------------------------------------------------------------------------------------------------


def _post(path: str, body: Any, *headers: tuple[bytes, bytes]) -> HostileRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    if not any(name == b"content-type" for name, _ in headers):
        headers = ((b"content-type", b"application/json"), *headers)
    return HostileRequest("", "POST", path, headers, data)


def _any_path(draw: Random) -> str:
    return draw.choice((*GENERATION, TOKENIZE, DETOKENIZE))


def _not_json(draw: Random) -> HostileRequest:
    return _post(_any_path(draw), draw.choice(NOT_JSON))


def _wrong_type(draw: Random) -> HostileRequest:
    path = _any_path(draw)
    body = good_body(path)
    for _ in range(draw.randint(1, 3)):
        name = draw.choice((*body, *OPTIONS))
        body[name] = copy.deepcopy(draw.choice(WRONG_VALUES))
    return _post(path, body)


def _missing_field(draw: Random) -> HostileRequest:
    path = _any_path(draw)
    body = good_body(path)
    del body[draw.choice(list(body))]
    return _post(path, body)


def _huge_number(draw: Random) -> HostileRequest:
    path = _any_path(draw)
    return _post(path, good_body(path) | {draw.choice(list(OPTIONS)): draw.choice(HUGE_NUMBERS)})


def _deep(draw: Random) -> HostileRequest:
    path, depth = _any_path(draw), draw.choice((40, 63, 64, 65, 200, 900, 20_000))
    left, right = draw.choice(((b"[", b"]"), (b'{"a":', b"}"), (b'[{"anyOf":', b"}]")))
    name = draw.choice(("metadata", "messages", "response_format", "tools", "logit_bias", "input", "prompt"))
    value = left * depth + b"1" + right * depth
    start = json.dumps(good_body(path)).encode()[:-1]
    return _post(path, start + b', "%s": ' % name.encode() + value + b"}")


def _wide(draw: Random) -> HostileRequest:
    path = _any_path(draw)
    count = draw.choice((1000, 1025, 9000, 60_000))
    item: Any = draw.choice((0, "x", {}, [], {"role": "user", "content": "x"}, {"type": "text", "text": "x"}))
    name = draw.choice(("messages", "tools", "stop", "documents", "metadata", "input", "stop_token_ids", "bad_words"))
    value = {f"k{i}": item for i in range(count)} if draw.random() < 0.3 else [item] * count
    return _post(path, good_body(path) | {name: value})


def _odd_text(draw: Random) -> HostileRequest:
    path, text = _any_path(draw), draw.choice(ODD_TEXTS)
    name = draw.choice(
        ("prompt", "input", "user", "model", "stop", "suffix", "session_id", "request_id", "instructions")
    )
    body = good_body(path) | {name: text}
    return _post(path, json.dumps(body, ensure_ascii=draw.random() < 0.5).encode("utf-8", "replace"))


def _foreign_field(draw: Random) -> HostileRequest:
    path = _any_path(draw)
    name, value = draw.choice(FOREIGN_FIELDS)
    return _post(path, good_body(path) | {name: value})


def _bad_header(draw: Random) -> HostileRequest:
    path = _any_path(draw)
    chosen = {header[0]: header for header in draw.sample(BAD_HEADERS, draw.randint(1, 3))}
    return _post(path, good_body(path), *chosen.values())


def _bad_id(draw: Random) -> HostileRequest:
    path = draw.choice(GENERATION)
    texts = ("id\nWARNING forged line", "id\r\n\r\n", "\x1b]0;title\x07", "\x00", "\u2028", "x" * 129, "%s%n")
    names = ("user", "session_id", "request_id", "prompt_cache_key", "model", "previous_response_id", "cache_salt")
    return _post(path, good_body(path) | {draw.choice(names): draw.choice(texts)})


def _bad_route(draw: Random) -> HostileRequest:
    path = draw.choice(
        ("/", "//", "/v1", "/v1/", "/v1/models/" + "x" * 3000, "/v1/models/%00", "/v1/embeddings", "/v1/audio/speech",
         "/cluster/nowhere", "/metrics/", "/../etc/passwd", "/docs", "/openapi.json", "/v1/completions?x=" + "y" * 3000,
         "/v1/load_lora_adapter", "/reset_prefix_cache", "/sleep", "/collective_rpc", "/v1/responses/x", "/%2e%2e/",
         "*")
    )  # fmt: skip
    method = draw.choice(("GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD", "TRACE", "BREW"))
    return _post(path, good_body(COMPLETIONS))._replace(method=method)


def _half_body(draw: Random) -> HostileRequest:
    path = _any_path(draw)
    body = json.dumps(good_body(path)).encode()
    cut = body[: draw.randint(0, len(body) - 1)]
    length = draw.choice((len(body), len(body) + 1, 1 << 20, 4 << 20))
    return _post(path, cut, (b"content-length", str(length).encode()))


def _bad_chunks(draw: Random) -> HostileRequest:
    path = _any_path(draw)
    body = json.dumps(good_body(path)).encode()
    sent = draw.choice(
        (b"zz\r\n%s\r\n0\r\n\r\n" % body, b"-5\r\n%s\r\n0\r\n\r\n" % body, b"1\r\n%s\r\n0\r\n\r\n" % body,
         b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n", b"fffffffffffffffff\r\n" + body)
    )  # fmt: skip
    return _post(path, sent, (b"transfer-encoding", b"chunked"))


def _schema(draw: Random) -> Json:
    pattern = {"type": "string", "pattern": draw.choice(COSTLY_PATTERNS)}
    match draw.randrange(9):
        case 0:
            return {"type": "object", "properties": {f"p{i}": pattern for i in range(draw.choice((1, 3, 700)))}}
        case 1:
            names = {f"^(ab{i}){{{draw.choice((9, 900))}}}$": {} for i in range(draw.choice((2, 200)))}
            return {"type": "object", "patternProperties": names}
        case 2:
            return {"enum": [f"value-{i}" for i in range(draw.choice((10, 3000, 20_000)))]}
        case 3:
            names = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(draw.choice((20, 1500)))}
            return {"$defs": {**names, f"d{len(names)}": pattern}, "$ref": "#/$defs/d0"}
        case 4:
            either: Json = {"type": "string"}
            for _ in range(draw.choice((5, 12))):
                either = {"anyOf": [either, {"type": "array", "items": either}]}
            return either
        case 5:
            return {"anyOf": [{"$ref": "#"}, {"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}}]}
        case 6:
            low, high = -(10**15), 10**15 + 7
            numbers = {f"p{i}": {"type": "integer", "minimum": low + i, "maximum": high} for i in range(500)}
            return {"type": "object", "properties": numbers}
        case 7:
            most = draw.choice((9, 4000, 10**6, 10**30))
            return {"type": "array", "maxItems": most, "items": {"type": "array", "maxItems": most, "items": pattern}}
    optional = {f"property-{i}": {"type": ["string", "null"], "format": "date-time"} for i in range(400)}
    return {"type": "object", "properties": optional}


def _costly_schema(draw: Random) -> HostileRequest:
    path, schema = draw.choice(GENERATION), _schema(draw)
    body = good_body(path)
    match draw.randrange(4):
        case 0 if path == RESPONSES:
            body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        case 1 if path != RESPONSES:
            body["structured_outputs"] = {"json": schema if draw.random() < 0.5 else json.dumps(schema)}
        case 2:
            function = {"type": "function", "name": "f", "parameters": schema}
            body["tools"] = [function if path == RESPONSES else {"type": "function", "function": function}]
            body["tool_choice"] = "required"
        case _:
            format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            body["response_format"] = format_
    return _post(path, body)


def _costly_guide(draw: Random) -> HostileRequest:
    path = draw.choice((COMPLETIONS, CHAT))
    pattern, grammar = draw.choice(COSTLY_PATTERNS), draw.choice(COSTLY_GRAMMARS)
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": pattern}}
    old = {
        "type": "structural_tag",
        "triggers": ["<"],
        "structures": [{"begin": "<", "end": ">", "schema": _schema(draw)}],
    }
    guide: Json = draw.choice(
        (
            {"regex": pattern}, {"grammar": grammar}, {"choice": ["x" * draw.choice((1, 999))] * 300},
            {"json_object": True}, {"structural_tag": json.dumps(tag)}, {"structural_tag": json.dumps(old)},
            {"structural_tag": "{"},
        )
    )  # fmt: skip
    if draw.random() < 0.3:
        return _post(path, good_body(path) | {"response_format": draw.choice((tag, old))})
    return _post(path, good_body(path) | {"structured_outputs": guide})


def _long_prompt(draw: Random) -> HostileRequest:
    path, size = _any_path(draw), draw.choice((3000, 60_000, 500_000, 4_100_000, 4_300_000))
    text = draw.choice(("a", "word ", "\n", "0", "é", "漢字", " " * 7 + "x", "aB3$ "))
    text = (text * size)[: size // len(text.encode())]
    body = good_body(path)
    match path:
        case "/v1/chat/completions":
            body["messages"][-1]["content"] = text
        case "/v1/responses":
            body["input"] = text
        case "/detokenize":
            body["tokens"] = [draw.randrange(VOCAB_SIZE)] * (size // 5)
        case _:
            body["prompt"] = text if draw.random() < 0.6 else [draw.randrange(VOCAB_SIZE)] * (size // 5)
    return _post(path, json.dumps(body, ensure_ascii=False).encode())


def _many_prompts(draw: Random) -> HostileRequest:
    prompt = draw.choice(
        (["a"] * 128, ["a"] * 129, ["a"] * 5000, [[5]] * 100, [[5]] * 2000, [""] * 9, [[]] * 9, [[1], "a"], ["a", 1])
    )
    return _post(COMPLETIONS, good_body(COMPLETIONS) | {"prompt": prompt, "n": draw.choice((1, 2, 16, 17, 128))})


def _bad_token(draw: Random) -> HostileRequest:
    token = draw.choice((-1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1, 2**31, 2**62, -(2**31)))
    name = draw.choice(("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias", "prompt", "tokens"))
    value: Any = {str(token): 1} if name == "logit_bias" else [token] * draw.choice((1, 50))
    path = DETOKENIZE if name == "tokens" else draw.choice((COMPLETIONS, CHAT))
    return _post(path, good_body(path) | {name: value})


def _media(draw: Random) -> HostileRequest:
    path = draw.choice((CHAT, RESPONSES, TOKENIZE))
    message = {"role": "user", "content": [draw.choice(MEDIA)] * draw.choice((1, 40))}
    body = good_body(path)
    body.pop("prompt", None)
    body["input" if path == RESPONSES else "messages"] = [message]
    return _post(path, body)


def _odd_but_good(draw: Random) -> HostileRequest:
    path = draw.choice((COMPLETIONS, CHAT))
    choices: list[Json] = [
        {"n": 16}, {"logprobs": 5}, {"stop": ["a", "b", "c"]}, {"min_tokens": MAX_TOKENS}, {"seed": -1},
        {"logit_bias": {str(i): -100 for i in range(500)}}, {"allowed_token_ids": [5]}, {"stream": True}, {"top_k": 1},
        {"structured_outputs": {"regex": "[a-z]{3}"}}, {"structured_outputs": {"choice": ["a", "b"]}},
        {"response_format": {"type": "json_object"}}, {"repetition_penalty": 1.9}, {"bad_words": ["a"] * 100},
        {"stream": True, "stream_options": {"include_usage": True}}, {"prompt_logprobs": 3}, {"ignore_eos": True},
    ]  # fmt: skip
    body = good_body(path) | draw.choice(choices)
    return _post(path, body | ({"logprobs": True} if path == CHAT and "logprobs" in body else {}))


# What makes a request of each kind, and how often it comes.
KINDS: dict[str, tuple[Callable[[Random], HostileRequest], float]] = {
    "not JSON": (_not_json, 4),
    "wrong type": (_wrong_type, 14),
    "missing field": (_missing_field, 2),
    "huge number": (_huge_number, 8),
    "deep": (_deep, 4),
    "wide": (_wide, 3),
    "odd text": (_odd_text, 8),
    "foreign field": (_foreign_field, 6),
    "bad header": (_bad_header, 6),
    "bad id": (_bad_id, 4),
    "bad route": (_bad_route, 5),
    "half body": (_half_body, 3),
    "bad chunks": (_bad_chunks, 2),
    "costly schema": (_costly_schema, 10),
    "costly guide": (_costly_guide, 10),
    "long prompt": (_long_prompt, 2),
    "many prompts": (_many_prompts, 2),
    "bad token": (_bad_token, 5),
    "media": (_media, 3),
    "odd but good": (_odd_but_good, 4),
}
