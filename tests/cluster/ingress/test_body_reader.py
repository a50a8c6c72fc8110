"""What is looked at before a body is read and parsed: room for the request, its length, and how much of it there is."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.datastructures import Headers

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.ingress.errors import OverloadedError, RequestRefused
from pengserve.cluster.ingress.guards import guard as guard_module
from pengserve.cluster.ingress.guards.body import MAX_CONTAINERS, MAX_VALUES, _check_counts, parse_object
from pengserve.cluster.ingress.guards.body_reader import SHORT_BYTES, BodyReader
from pengserve.cluster.ingress.guards.guard import Guard
from pengserve.cluster.ingress.in_flight.traffic import Traffic
from pengserve.planners.types.config import InstanceConfig
from tests.support.effort import examples
from tests.support.speed import least_cpu_s, slowness

MAX_LAG_S = 0.1
JSON_TYPE = (b"content-type", b"application/json")
HEADERS = Headers(raw=[JSON_TYPE])

App = Callable[[Any, Any, Any], Awaitable[None]]


async def answer_ok(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def guarded(app: App = answer_ok, *, num_slots: int = 1) -> tuple[Guard, list[str]]:
    """A guard around `app`, and the list of what it refused."""
    rejected: list[str] = []
    guard = Guard(
        app,
        config=IngressConfig(instance=InstanceConfig(app="tests", model="none"), num_instances=1),
        traffic=Traffic(max_queued=1, num_ingresses=1, num_slots=lambda: num_slots),
        vocab_size=10,
        on_rejected=rejected.append,
    )
    return guard, rejected


async def ask(guard: Guard, path: str, body: bytes | None, *headers: tuple[bytes, bytes]) -> int:
    """The status of the answer; with `body` None the body never comes."""
    statuses: list[int] = []
    messages = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "method": "POST", "path": path, "headers": [JSON_TYPE, *headers]}
    await guard(scope, receive, send)
    return statuses[0]


class Sender:
    """A client that sends a body of zeros in pieces, as it is told to."""

    def __init__(self, reader: BodyReader, most: int = 1 << 30) -> None:
        self._pieces: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()
        self.task = asyncio.create_task(reader.read(HEADERS, self._receive, most))

    async def _receive(self) -> Any:
        size, more = await self._pieces.get()
        return {"type": "http.request", "body": bytes(size), "more_body": more}

    async def send(self, size: int, *, more: bool = True) -> None:
        self._pieces.put_nowait((size, more))
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_full_server_says_so_before_it_reads_the_body(path: str) -> None:
    guard, rejected = guarded(num_slots=0)
    guard._traffic.num_in_flight = 5
    async with asyncio.timeout(20):
        assert await ask(guard, path, None) == 429
        assert rejected == ["overload"]
        guard._traffic.is_draining = True
        assert await ask(guard, path, None) == 503
        assert rejected == ["overload", "no_instance"]


async def test_long_texts_to_tokenize_go_one_at_a_time_and_all_of_them_are_bounded() -> None:
    running, most, release = 0, 0, asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await release.wait()
        running -= 1
        await answer_ok(scope, receive, send)

    guard, _ = guarded(slow)
    long = json.dumps({"prompt": "a" * guard_module.LONG_TEXT_BYTES}).encode()
    asked = [asyncio.create_task(ask(guard, "/tokenize", long)) for _ in range(guard_module.MAX_TOKENIZING)]
    await asyncio.sleep(0.01)
    assert most == 1
    assert await ask(guard, "/detokenize", b'{"tokens": [1]}') == 429
    release.set()
    assert await asyncio.gather(*asked) == [200] * guard_module.MAX_TOKENIZING
    assert await ask(guard, "/detokenize", b'{"tokens": [1]}') == 200
    assert most == 1


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_text_of_megabytes_is_not_tokenized(path: str) -> None:
    guard, _ = guarded()
    length = str(guard_module.MAX_TOKEN_BODY_BYTES + 1).encode()
    async with asyncio.timeout(20):
        assert await ask(guard, path, None, (b"content-length", length)) == 413


async def test_long_bodies_that_arrive_share_a_bounded_memory_and_short_ones_always_pass() -> None:
    reader = BodyReader(max_arriving_bytes=10 * SHORT_BYTES)
    slow = Sender(reader)
    for _ in range(11):  # the first piece is short
        await slow.send(SHORT_BYTES)
    assert reader.arriving_bytes == 10 * SHORT_BYTES
    late, short = Sender(reader), Sender(reader)
    await late.send(SHORT_BYTES)
    await late.send(1)
    with pytest.raises(OverloadedError) as refused:
        await late.task
    assert int(refused.value.http_status) == 429
    await short.send(SHORT_BYTES, more=False)
    assert len(await short.task) == SHORT_BYTES
    await slow.send(0, more=False)
    assert len(await slow.task) == 11 * SHORT_BYTES
    assert reader.arriving_bytes == 0


async def test_memory_is_given_back_when_a_client_leaves_or_sends_too_much() -> None:
    reader = BodyReader()
    gone, large = Sender(reader), Sender(reader, most=3 * SHORT_BYTES)
    for _ in range(3):
        await gone.send(SHORT_BYTES)
        await large.send(SHORT_BYTES)
    assert reader.arriving_bytes == 4 * SHORT_BYTES
    gone.task.cancel()
    await large.send(1)
    with pytest.raises(RequestRefused, match="at most"):
        await large.task
    with pytest.raises(asyncio.CancelledError):
        await gone.task
    assert reader.arriving_bytes == 0


LONG_BODIES = {
    "token ids": b'{"prompt": [' + b"5," * (MAX_VALUES + 1) + b"5]}",
    "half a million lists": b'{"x": [' + b"[]," * 500_000 + b"[]]}",
    "half a million objects": b'{"x": [' + b"{}," * 500_000 + b"{}]}",
    "a million numbers": b'{"x": [' + b"1," * 1_000_000 + b"1]}",
    "strings between": b'{"x": [' + b'"\\"a,",' * 300_000 + b"1]}",
}


@pytest.mark.parametrize("body", LONG_BODIES.values(), ids=LONG_BODIES)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(body: bytes) -> None:
    def refuse() -> None:
        with pytest.raises(RequestRefused, match="The body holds more than"):
            parse_object(body)

    assert least_cpu_s(refuse, times=3) < MAX_LAG_S * slowness()


def test_what_fits_into_the_context_is_never_too_many() -> None:
    long = b'{"prompt": [' + b"5," * (MAX_VALUES + 1) + b"5]}"
    assert len(parse_object(long, max_model_len=MAX_VALUES + 2)["prompt"]) == MAX_VALUES + 2
    text = "[{,}]" * MAX_VALUES
    assert parse_object(json.dumps({"prompt": text}).encode())["prompt"] == text
    with_quotes = '\\"[{,' * MAX_CONTAINERS
    assert parse_object(json.dumps({"prompt": with_quotes}).encode())["prompt"] == with_quotes


json_values = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(alphabet='ab,[]{}"\\\n', max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a,"{[\\', max_size=3), inner, max_size=4),
    max_leaves=30,
)


def num_commas(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    children = list(value.values() if isinstance(value, dict) else value)
    return max(0, len(children) - 1) + sum(map(num_commas, children))


@settings(max_examples=examples(300))
@given(json_values)
def test_values_are_counted_without_parsing(value: Any) -> None:
    body, commas = json.dumps({"x": value}).encode(), num_commas(value)
    _check_counts(body, commas)
    if commas:
        with pytest.raises(RequestRefused, match=f"more than {commas - 1} values"):
            _check_counts(body, commas - 1)


@pytest.mark.parametrize("name", ["user", "session_id", "request_id", "previous_response_id", "prompt_cache_key"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_an_id_that_would_break_a_line_of_a_log_is_refused(name: str, path: str) -> None:
    guard, rejected = guarded()
    for value in ("a\nWARNING forged", "a\x1b[2J", "\x00", "\u2028", "\x85"):
        assert await ask(guard, path, json.dumps({name: value}).encode()) == 400
    assert rejected == ["invalid"] * 5
    assert await ask(guard, path, json.dumps({name: "Jörg Müller 日本 \u00a0-1"}).encode()) == 200
