"""How long an event loop is held up: the processor time that its thread spends between two turns of a watching task."""

import asyncio
import contextlib
import gc
import time
from typing import Any

PERIOD_S = 0.001


class LoopLag:
    """ASGI middleware that watches the loop it runs in. Time that other processes and threads take does not count."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def around(self, app: Any) -> Any:
        """`app` with this watch beside it."""

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            if self._task is None:
                gc.freeze()  # as an ingress does when it has started
                self._task = asyncio.create_task(self._watch())
            try:
                await app(scope, receive, send)
            finally:
                if scope["type"] == "lifespan":
                    self._task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await self._task

        return watched

    async def _watch(self) -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(PERIOD_S)
            now_s = time.thread_time()
            self.worst_s, last_s = max(self.worst_s, now_s - last_s), now_s
