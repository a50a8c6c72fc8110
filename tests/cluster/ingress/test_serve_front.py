"""Laws of what stands in front of Ray Serve: its headers do not come through, and each answer has one request id."""

import importlib
from typing import Any

import httpx
import pytest

from pengserve.cluster.ingress import serve_front
from pengserve.cluster.ingress.serve_front import ServeFront

STEERING = [
    "x-request-disconnect-disabled",
    "X-Request-Timeout-Seconds",
    "serve_multiplexed_model_id",
    "Serve-Multiplexed-Model-Id",
    "x-session-id",
    "x_session_id",
    "x-serve-router-target",
]


class ServeStub:
    """Reads every header as UTF-8 and puts the request id on its answer, as Serve does."""

    def __init__(self, *, fails: bool = False) -> None:
        self.seen: dict[str, str] = {}
        self._fails = fails

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        self.seen = {name.decode(): value.decode() for name, value in scope["headers"]}
        if self._fails:
            raise KeyError("a secret")
        headers = [(b"x-request-id", self.seen["x-request-id"].encode())] * 2
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"{}"})


async def ask(stub: ServeStub, headers: list[tuple[bytes, bytes]]) -> httpx.Response:
    transport = httpx.ASGITransport(app=ServeFront(stub))
    async with httpx.AsyncClient(transport=transport, base_url="http://tests") as http:
        return await http.get("/v1/models", headers=headers)


@pytest.mark.parametrize("name", STEERING)
@pytest.mark.parametrize("value", [b"?1", b"0.001", b"\xff"])
async def test_no_header_steers_serve(name: str, value: bytes) -> None:
    stub = ServeStub()
    answer = await ask(stub, [(name.encode(), value), (b"authorization", b"Bearer k")])
    assert answer.status_code == 200
    assert name.lower() not in stub.seen
    assert stub.seen["authorization"] == "Bearer k"


async def test_a_session_comes_through_under_a_name_that_serve_does_not_read() -> None:
    stub = ServeStub()
    await ask(stub, [(b"X-Session-ID", b"s-1")])
    assert stub.seen["x-pengserve-session"] == "s-1" and "x-session-id" not in stub.seen


@pytest.mark.parametrize("name", ["traceparent", "tracestate"])
async def test_traces_come_through_where_they_can_be_read(name: str) -> None:
    stub = ServeStub()
    await ask(stub, [(name.encode(), b"00-abc-def-01")])
    assert stub.seen[name] == "00-abc-def-01"
    assert (await ask(stub, [(name.encode(), b"\xff")])).status_code == 200
    assert name not in stub.seen


@pytest.mark.parametrize("given", [b"", b"a b", b"\xff", b"x" * 5000, b"my-id_1.2:3"])
async def test_each_answer_has_one_request_id_and_serve_the_same(given: bytes) -> None:
    stub = ServeStub()
    answer = await ask(stub, [(b"x-request-id", given), (b"x-request-id", b"second")])
    (request_id,) = answer.headers.get_list("x-request-id")
    assert stub.seen["x-request-id"] == request_id
    assert (request_id.encode() == given) == (given == b"my-id_1.2:3")


async def test_a_failure_of_serve_is_answered_in_shape() -> None:
    answer = await ask(ServeStub(fails=True), [])
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, 500)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in answer.text
    assert len(answer.headers.get_list("x-request-id")) == 1


@pytest.mark.slow
def test_serve_reads_no_header_that_is_not_known_here() -> None:
    """An upgrade of Ray that reads one more fails here: take it out in `serve_front.py`, or name it below."""
    from ray.serve._private import constants

    names = {
        value.lower().replace("_", "-")
        for name, value in vars(constants).items()
        if isinstance(value, str) and ("HEADER" in name or name in ("SERVE_SESSION_ID", "SERVE_MULTIPLEXED_MODEL_ID"))
    }
    names.discard("request-headers")  # a field of the ingress request router's answer
    assert names == serve_front.DROPPED | {serve_front.DROPPED_PREFIX, "x-request-id"}


@pytest.mark.slow
def test_serve_calls_it_by_the_variable() -> None:
    from ray._common.utils import import_attr
    from ray.serve._private import constants

    assert hasattr(constants, serve_front.VARIABLE)
    (middleware,) = import_attr(serve_front.IMPORT_PATH)()
    assert middleware.cls is ServeFront
    module = importlib.import_module("ray.serve._private.http_util")
    assert module.validate_http_proxy_callback_return([middleware]) == [middleware]
