"""The generator of hostile requests is deterministic; what the ingress's own checks do with its requests is cheap."""

import asyncio

import pytest

from tests.support.hostile import KINDS, hostile_request, hostile_requests
from tests.support.hostile_sending import HostileRequest, send, to_bytes


def test_a_seed_and_an_index_give_the_same_request_again() -> None:
    first = list(hostile_requests(seed=3, count=60))
    assert first == [hostile_request(3, index) for index in range(60)]
    assert first != list(hostile_requests(seed=4, count=60))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_asked_for_and_is_one_http_request(kind: str) -> None:
    for request in hostile_requests(seed=5, count=20, kinds=(kind,)):
        assert request.kind == kind
        head, _, body = to_bytes(request).partition(b"\r\n\r\n")
        assert head.startswith(request.method.encode() + b" ") and body == request.body


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\n", 404),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n", 413),
        (b"HTTP/1.1 100 Continue\r\n\r\n", None),
        (b"", None),
    ],
)
async def test_the_status_of_the_final_answer_counts(answer: bytes, status: int | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        request = HostileRequest("x", "POST", "/", ((b"expect", b"100-continue"),), b"")
        assert await send("127.0.0.1", port, request, timeout_s=60) == status
