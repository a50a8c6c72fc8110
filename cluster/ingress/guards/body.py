"""What a request body may hold, checked before vLLM sees it: sizes, counts, and fields that are not for clients.

vLLM checks types and most ranges. Here stands what it leaves open and what would cost an instance too much, or its
life: an index outside the vocabulary, a nesting that overflows a parser's stack.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from pengserve.cluster.ingress.config import LimitConfig
from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ingress.guards.security import MAX_SEQUENCES_PER_REQUEST
from pengserve.cluster.ingress.guides.schema_cost import SCHEMAS, check_schemas
from pengserve.cluster.ingress.request.request_ids import MAX_ID_CHARS

MAX_DEPTH = 64
MAX_CONTAINERS = 8192  # objects and lists in one body; pydantic tries each against every member of its unions
MAX_VALUES = 256 << 10  # values in one body, mostly token ids: parsing a million of them takes 0.2 s
MAX_LIST = 1024  # entries of a list or object, but for those in LONG_LISTS
MAX_STOP_CHARS = 256

# Fields that vLLM reads and a client has no business with, and why not.
FORBIDDEN: Mapping[str, str] = {
    "chat_template": "chat templates are set by the server",
    "media_io_kwargs": "media options are set by the server",
    "mm_processor_kwargs": "media options are set by the server",
    "kv_transfer_params": "KV transfer is the server's own",
    "ec_transfer_params": "encoder transfer is the server's own",
    "vllm_xargs": "extension arguments are not accepted",
    "prompt_embeds": "prompts are text or token ids",
    "use_beam_search": "beam search is not offered",
    "logits_processors": "logits processors are set by the server",
}
# Lists and maps of bounded length.
MAX_ITEMS: Mapping[str, int] = {
    "stop_token_ids": 128,
    "bad_words": 128,
    "logprob_token_ids": 128,
    "logit_bias": 1024,
    "allowed_token_ids": 65536,
    "tools": 128,
    "documents": 128,
}
TOKEN_ID_LISTS = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")

LONG_LISTS = frozenset({"prompt", "tokens", "allowed_token_ids", *SCHEMAS})

_LONG_NUMBER = re.compile(rb"\d{19}")  # what may not fit into 64 bits
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_object(body: bytes, max_model_len: int = 0) -> dict[str, Any]:
    """The JSON object in `body`. A body with a prompt of `max_model_len` token ids is never too long.

    Raises:
        RequestRefused: 400: no JSON, or JSON that cannot be worked with (NaN, lone surrogates, too deep, too long).
    """
    _check_counts(body, max(MAX_VALUES, 2 * max_model_len))
    try:
        parse_int = _int64 if _LONG_NUMBER.search(body) else int
        data = json.loads(body, parse_constant=_refuse_constant, parse_float=_finite, parse_int=parse_int)
    except RequestRefused:
        raise
    except RecursionError:
        raise RequestRefused(400, f"The body is nested deeper than {MAX_DEPTH} levels.") from None
    except ValueError:  # also UnicodeDecodeError, and integers of more digits than Python reads
        raise RequestRefused(400, "The body is not valid JSON.") from None
    if not isinstance(data, dict):
        raise RequestRefused(400, "The body must be a JSON object.")
    if body.count(b"{") + body.count(b"[") > MAX_DEPTH or body.count(b",") > MAX_LIST:
        _check_size(data)
    if _SURROGATE.search(body) and not _is_encodable(data):
        raise RequestRefused(400, "The body holds half of a surrogate pair, which is no character.")
    return data


def check_generation(data: Mapping[str, Any], limits: LimitConfig, vocab_size: int) -> int:
    """Checks a completion, chat or responses body; returns how many sequences it asks for.

    Raises:
        RequestRefused: 400, naming the field.
    """
    check_common(data)
    num_sequences = _check_count(data, limits)
    _check_stop(data, limits)
    for name, most in MAX_ITEMS.items():
        value = data.get(name)
        if isinstance(value, list | dict) and len(value) > most:
            _refuse(name, f"at most {most} entries are accepted, got {len(value)}")
    for name in TOKEN_ID_LISTS:
        _check_token_ids(name, data.get(name), vocab_size)
    check_schemas(data, allow_grammars=limits.allow_grammars)
    return num_sequences


def check_common(data: Mapping[str, Any]) -> None:
    """Checks what holds for every route.

    Raises:
        RequestRefused: 400, naming the field.
    """
    for name, why in FORBIDDEN.items():
        if data.get(name):
            _refuse(name, why)
    template_arguments = data.get("chat_template_kwargs")
    if isinstance(template_arguments, dict):
        for name in ("chat_template", "tokenize"):
            if name in template_arguments:
                _refuse(f"chat_template_kwargs.{name}", FORBIDDEN["chat_template"])
    for name in ("prompt", "tokens"):
        _check_tokens(name, data.get(name))
    for name in ("request_id", "session_id", "user", "previous_response_id", "prompt_cache_key"):
        value = data.get(name)
        if isinstance(value, str) and len(value) > MAX_ID_CHARS:
            _refuse(name, f"at most {MAX_ID_CHARS} characters are accepted")
        if isinstance(value, str) and _CONTROL.search(value):
            _refuse(name, "line breaks and other control characters are not accepted")


def _check_count(data: Mapping[str, Any], limits: LimitConfig) -> int:
    counts = {}
    for name in ("n", "best_of"):
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            _refuse(name, "an integer is expected")
        if not 1 <= value <= limits.max_n:
            _refuse(name, f"a number from 1 to {limits.max_n} is accepted, got {_short(value)}")
        counts[name] = value
    n = counts.get("n", 1)
    if counts.get("best_of", n) != n:
        _refuse("best_of", "only the value of n is accepted")
    prompt = data.get("prompt")
    # A list of numbers is one prompt of token ids; any other list is a list of prompts.
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    if num_prompts * n > MAX_SEQUENCES_PER_REQUEST:
        _refuse("prompt", f"prompts times n may be at most {MAX_SEQUENCES_PER_REQUEST}, got {num_prompts * n}")
    return num_prompts * n


def _check_stop(data: Mapping[str, Any], limits: LimitConfig) -> None:
    stop = data.get("stop")
    strings = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
    if len(strings) > limits.max_stop_strings:
        _refuse("stop", f"at most {limits.max_stop_strings} stop strings are accepted, got {len(strings)}")
    for name, values in (("stop", strings), ("bad_words", data.get("bad_words"))):
        for value in values if isinstance(values, list) else []:
            if isinstance(value, str) and len(value) > MAX_STOP_CHARS:
                _refuse(name, f"at most {MAX_STOP_CHARS} characters are accepted in one string")


def _check_token_ids(name: str, values: Any, vocab_size: int) -> None:
    """The samplers index the logits with these: one outside would end the step for everybody."""
    for value in values if isinstance(values, list) else []:
        if isinstance(value, int) and not 0 <= value < vocab_size:
            _refuse(name, f"token ids are from 0 to {vocab_size - 1}, got {_short(value)}")


def _check_counts(body: bytes, max_values: int) -> None:
    """Counts what parsing would make, before parsing."""
    if body.count(b",") <= max_values and body.count(b"{") + body.count(b"[") <= MAX_CONTAINERS:
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    rest = b"".join(unescaped.split(b'"')[::2])  # what stands outside of strings
    if rest.count(b"{") + rest.count(b"[") > MAX_CONTAINERS:
        raise RequestRefused(400, f"The body holds more than {MAX_CONTAINERS} lists and objects.")
    if rest.count(b",") > max_values:
        raise RequestRefused(400, f"The body holds more than {max_values} values, token ids among them.")


def _check_size(data: Mapping[str, Any]) -> None:
    """Bounds depth, number and length of containers: what validation costs grows with each."""
    level = [(name, value) for name, value in data.items() if isinstance(value, dict | list)]
    num_containers = len(level)
    for _ in range(MAX_DEPTH):
        below: list[tuple[str, Any]] = []
        for name, value in level:
            if len(value) > MAX_LIST and name not in LONG_LISTS and name not in MAX_ITEMS:
                _refuse(name, f"at most {MAX_LIST} entries are accepted in one list or object")
            children = value.values() if isinstance(value, dict) else value
            below.extend((name, child) for child in children if isinstance(child, dict | list))
        num_containers += len(below)
        if num_containers > MAX_CONTAINERS:
            raise RequestRefused(400, f"The body holds more than {MAX_CONTAINERS} lists and objects.")
        if not below:
            return
        level = below
    raise RequestRefused(400, f"The body is nested deeper than {MAX_DEPTH} levels.")


def _check_tokens(name: str, value: Any) -> None:
    """Text, token ids, or a list of one of them: told apart here, at the speed of C, not once per entry."""
    if not isinstance(value, list):
        return
    kinds = set(map(type, value))
    if kinds == {list}:
        kinds = set().union(*(map(type, item) for item in value)) or {int}
        is_uniform = kinds == {int}
    else:
        is_uniform = kinds in (set(), {int}, {str})
    if not is_uniform:
        _refuse(name, "a string, a list of token ids, or a list of either is expected")


def _is_encodable(data: Any) -> bool:
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(text: str) -> NoReturn:
    raise RequestRefused(400, f"The body holds {text}, which is not JSON.")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise RequestRefused(400, "The body holds a number that is too large.")
    return value


def _int64(text: str) -> int:
    value = int(text) if len(text) < 32 else 1 << 64
    if not -(1 << 63) <= value < 1 << 63:
        raise RequestRefused(400, "The body holds an integer of more than 64 bits.")
    return value


def _short(value: object) -> str:
    return str(value)[:40]


def _refuse(param: str, why: str) -> NoReturn:
    raise RequestRefused(400, f"{param}: {why}", param=param)
