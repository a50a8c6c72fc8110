"""uvicorn's connections end where no request comes and where no answer is read; all others stay."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pengserve.cluster.haproxy.limits import ConnectionLimits
from pengserve.cluster.ingress.guards.connection_guard import guard

pytestmark = pytest.mark.slow  # waits for time-outs

LIMITS = ConnectionLimits(header_timeout_s=1, client_timeout_s=1)
PATIENCE_S = 30.0
REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
SLOW_ANSWER_S = 2.5  # longer than two checks
left = threading.Event()


async def app(scope: Any, receive: Any, send: Any) -> None:
    """A short answer, a late one, or a stream without an end."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/late":
        await asyncio.sleep(SLOW_ANSWER_S)
    elif scope["path"] == "/endless":
        leaving = asyncio.create_task(_left(receive))
        while not leaving.done():
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
        left.set()
        return
    await send({"type": "http.response.body", "body": b"ok"})


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.fixture(scope="module", params=[H11Protocol, HttpToolsProtocol])
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """A server whose connections are guarded."""
    guarded = type("Guarded", (request.param,), {})
    guard(guarded, LIMITS)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, http=guarded, log_level="critical", timeout_keep_alive=60)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(PATIENCE_S)


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    connection.sendall(sent)
    return connection


@pytest.mark.parametrize("sent", [b"", b"GET /ready HT"])
def test_without_all_headers_a_connection_ends(port: int, sent: bytes) -> None:
    with connect(port, sent) as half_open:
        assert half_open.recv(4096) == b""


def test_a_second_request_has_no_more_time_than_the_first(port: int) -> None:
    with connect(port, REQUEST) as connection:
        read_answer(connection)
        connection.sendall(b"GET / HTTP/1.1\r\nHo")
        assert connection.recv(4096) == b""


def test_late_answers_and_idle_connections_stay(port: int) -> None:
    with connect(port, REQUEST.replace(b"/ ", b"/late ")) as connection:
        read_answer(connection)
        time.sleep(2.5 * LIMITS.header_timeout_s)
        connection.sendall(REQUEST)
        read_answer(connection)


def test_a_client_that_never_reads_is_left(port: int) -> None:
    left.clear()
    with connect(port, REQUEST.replace(b"/ ", b"/endless ")):
        assert left.wait(PATIENCE_S)


def read_answer(connection: socket.socket) -> None:
    answer = b""
    while not answer.endswith(b"0\r\n\r\n"):
        piece = connection.recv(4096)
        assert piece, answer
        answer += piece
