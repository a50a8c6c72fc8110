"""What Ray Serve does around an application in its replica, without Ray: it reads on, and cancels when clients leave.

As `Replica._direct_ingress_asgi` of Serve 2.60 does: the application gets messages from a queue, and its task is
cancelled where the client has gone or the request's own time-out has passed.
"""

import asyncio
from typing import Any

STUCK_HEADER = "x-test-stuck"  # "1": the client reads one piece of its answer, and nothing more fits into its socket


class ServeLike:
    """ASGI middleware: the end of a client cancels the application at once, in any await."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages: asyncio.Queue[Any] = asyncio.Queue()
        gone: list[Any] = []

        async def read_on() -> None:
            while not gone:
                message = await receive()
                await messages.put(message)
                if message["type"] == "http.disconnect":
                    gone.append(message)

        async def receive_queued() -> Any:
            return gone[0] if gone and messages.empty() else await messages.get()

        async def send_and_stand(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.body" and message.get("more_body"):
                await asyncio.Event().wait()

        is_stuck = (STUCK_HEADER.encode(), b"1") in scope["headers"]
        answering = asyncio.create_task(self._app(scope, receive_queued, send_and_stand if is_stuck else send))
        reading = asyncio.create_task(read_on())
        await asyncio.wait([answering, reading], return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            reading.cancel()
            await answering
        else:
            answering.cancel()
