"""Law: what a request has begun on instances ends with it, even while the generators that read from there are held."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.ingress.guards.guard import Guard
from pengserve.cluster.ingress.in_flight.traffic import Traffic
from pengserve.cluster.ingress.request.begun import Begun, current_begun, ending_with_block
from pengserve.planners.types.config import InstanceConfig

BODY = b'{"model": "tiny", "prompt": "Hi"}'
SCOPE: Scope = {
    "type": "http",
    "method": "POST",
    "path": "/v1/completions",
    "raw_path": b"/v1/completions",
    "query_string": b"",
    "headers": [(b"content-type", b"application/json")],
}


def test_what_has_ended_is_not_ended_again() -> None:
    ended: list[list[str]] = []
    with ending_with_block(ended.append) as begun:
        for request_id in ("b", "a", "c"):
            begun.add(request_id)
        begun.discard("c")
        assert not begun.is_over
    assert begun.is_over and ended == [["a", "b"]]
    with ending_with_block(ended.append) as begun:
        begun.add("a")
        begun.discard("a")
    assert len(ended) == 1


class Application:
    """Streams without end, and keeps a reference to what it streams, as a frame in a cycle of references does."""

    def __init__(self) -> None:
        self.held: AsyncGenerator[bytes, None] | None = None
        self.begun: Begun | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun = current_begun.get()
        self.held = self._pieces()
        await StreamingResponse(self.held)(scope, receive, send)

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        assert self.begun is not None
        self.begun.add("endless")
        while True:
            yield b"piece"


@pytest.mark.parametrize("fault", [asyncio.CancelledError, OSError])
async def test_a_stream_that_breaks_off_leaves_nothing_running(fault: type[BaseException]) -> None:
    app, aborted = Application(), list[str]()
    guard = Guard(
        app,
        config=IngressConfig(instance=InstanceConfig(app="tests", model="none"), num_instances=1),
        traffic=Traffic(max_queued=1, num_ingresses=1, num_slots=lambda: 1),
        vocab_size=10,
        abort=aborted.extend,
    )
    messages = [{"type": "http.request", "body": BODY, "more_body": False}]

    async def receive() -> Any:
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise fault

    with pytest.raises(BaseException):  # noqa: B017 -- which one is Starlette's choice
        await guard({**SCOPE, "asgi": {"spec_version": "2.4"}}, receive, send)
    assert aborted == ["endless"] and app.begun is not None and app.begun.is_over
    assert app.held is not None
    await app.held.aclose()
