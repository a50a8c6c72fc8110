"""`GET /cluster/stream`: what the feed tells, as server-sent events, until the page leaves or falls behind."""

import asyncio
from collections.abc import Callable

from fastapi.sse import format_sse_event
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pengserve.cluster.ui.feed import Feed, Watcher

PING_S = 15.0  # without a message; proxies end connections that are silent for long
MAX_AGE_S = 30.0  # then the browser comes again: its cookie is checked, and no ingress waits long for it when it ends
DRAINING_AGE_S = 1.0  # while the application drains: nothing may keep this ingress
WAKE_S = 1.0
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

_PING = format_sse_event(data_str=None, comment="ping")


class FeedResponse(Response):
    """An answer that goes on while the page listens. Bytes that the page does not read end it."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, watcher: Watcher, is_ending: Callable[[], bool]) -> None:
        """`is_ending` tells whether this ingress drains: an answer must not keep it."""
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._feed, self._watcher, self._is_ending = feed, watcher, is_ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends until the page has gone, is let go, or has listened for `MAX_AGE_S`."""
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_until_gone(receive))
        dropped = asyncio.create_task(self._watcher.dropped.wait())
        tasks = (sending, leaving, dropped)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._feed.leave(self._watcher)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        now_s = asyncio.get_running_loop().time
        started_s = sent_s = now_s()
        watcher = self._watcher
        while now_s() - started_s < (DRAINING_AGE_S if self._is_ending() else MAX_AGE_S):
            watcher.news.clear()
            body = b"".join(watcher.waiting)
            watcher.waiting.clear()
            if body or now_s() - sent_s >= PING_S:
                await send({"type": "http.response.body", "body": body or _PING, "more_body": True})
                sent_s = now_s()
            try:
                async with asyncio.timeout(WAKE_S):
                    await watcher.news.wait()
            except TimeoutError:
                continue
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
