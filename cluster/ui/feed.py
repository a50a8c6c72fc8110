"""One look at the cluster a second, for all pages that are open; none while none is.

consumes: the controller's snapshots and events
produces: encoded server-sent events, the same bytes for each page
waits for: a second, while a page is open and for `LINGER_S` after the last one
begins with the first page; is unblocked by none; ends by `close`
"""

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi.sse import format_sse_event

from pengserve.cluster.ingress.errors import RequestRefused
from pengserve.cluster.ui.view import STORY, View, delta_of, view_of
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.events import Event
from pengserve.planners.types.snapshot import ClusterSnapshot

logger = logging.getLogger(__name__)

PERIOD_S = 1.0
ANSWER_TIMEOUT_S = 5.0  # of the controller
LINGER_S = 5.0  # without a page before the feed rests: a page that comes again soon misses nothing
MAX_CLIENTS = 32  # pages of one ingress
MAX_BEHIND = 64  # messages that a page may not have read; then it is let go, and may come again
KEPT_MESSAGES = 128  # for pages that come again
KEPT_STORY = 200  # newest events of the log that a new page is told
PAGE_EVENTS = 1000
MAX_DIGITS = 18
RETRY_MS = 500  # that a browser waits before it comes again


class ClusterSource(Protocol):
    """What is asked of the controller. Raises EngineError while it cannot be reached."""

    async def snapshot(self) -> ClusterSnapshot:
        """All that is known of the cluster."""

    async def events(self, after: int, limit: int) -> Sequence[Event]:
        """Events with a sequence number above `after`."""


class Tap(Protocol):
    """What the ingress measures for open pages alone."""

    def open(self) -> None:
        """A page looks: measure from now on."""

    def read(self) -> dict[str, Any] | None:
        """What was measured since the last call."""

    def close(self) -> None:
        """No page looks any more."""


@dataclass(eq=False, slots=True)
class Watcher:
    """One open page: what it was sent and has not read."""

    waiting: deque[bytes]
    news: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: asyncio.Event = field(default_factory=asyncio.Event)  # it reads too slowly, or the feed ends

    def push(self, message: bytes) -> None:
        """Adds one message, or lets the page go."""
        if len(self.waiting) >= MAX_BEHIND:
            self.drop()
            return
        self.waiting.append(message)
        self.news.set()

    def drop(self) -> None:
        """Lets the page go; it may come again."""
        self.dropped.set()
        self.waiting.clear()
        self.news.set()


@dataclass(frozen=True, slots=True)
class _Message:
    number: int
    encoded: bytes


class Feed:
    """All open pages of an ingress, and what they are told. Lives on one event loop."""

    def __init__(self, source: ClusterSource, tap: Tap | None = None, *, period_s: float = PERIOD_S) -> None:
        self._source, self._tap, self._period_s = source, tap, period_s
        self._name = secrets.token_hex(4)  # numbers of messages count within one feed
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._view: View | None = None
        self._number = 0
        self._kept: deque[_Message] = deque(maxlen=KEPT_MESSAGES)
        self._story: deque[Event] = deque(maxlen=KEPT_STORY)
        self._seq = 0  # of the newest event that was read
        self._controller_s = 0.0

    @property
    def num_watchers(self) -> int:
        """Open pages."""
        return len(self._watchers)

    @property
    def is_resting(self) -> bool:
        """Whether nothing is asked of the controller, and nothing measured."""
        return self._task is None

    def join(self, last_id: str = "") -> Watcher:
        """Begins to tell a page, with what it missed since the message `last_id`, or else with everything.

        Raises:
            RequestRefused: 429, too many pages are open.
        """
        if len(self._watchers) >= MAX_CLIENTS:
            raise RequestRefused(429, f"{MAX_CLIENTS} pages watch this ingress already: close one.", retry_after_s=5)
        watcher = Watcher(deque([b"retry: %d\n\n" % RETRY_MS]))
        if self._view is not None:
            missed = self._missed(last_id)
            watcher.waiting.extend([self._everything()] if missed is None else missed)
        watcher.news.set()
        self._watchers.add(watcher)
        if self._task is None:
            self._begin()
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """A page has gone. Some seconds after the last one the feed rests."""
        self._watchers.discard(watcher)

    def close(self) -> None:
        """Lets all pages go, and rests."""
        for watcher in tuple(self._watchers):
            watcher.drop()
            self.leave(watcher)
        if self._task is not None:
            self._task.cancel()
            self._rest()

    def _begin(self) -> None:
        if self._tap is not None:
            self._tap.open()
        self._task = asyncio.create_task(self._run(), name="ingress-pages")

    def _rest(self) -> None:
        self._task, self._view = None, None
        self._kept.clear()
        if self._tap is not None:
            self._tap.close()

    async def _run(self) -> None:
        left_s = LINGER_S
        while left_s > 0:
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await self._look()
            except (EngineError, TimeoutError):
                if self._view is not None:
                    self._view = self._view | {"is_away": True}
                self._tell("delta", {"is_away": True})
            except Exception:
                logger.exception("open pages were not told what is new")
            await asyncio.sleep(self._period_s)
            left_s = LINGER_S if self._watchers else left_s - self._period_s
        self._rest()

    async def _look(self) -> None:
        snapshot = await self._source.snapshot()
        news = await self._read_story(snapshot.controller_started_s)
        view = view_of(snapshot) | {"is_away": False}
        if self._tap is not None:
            view["traffic"] = self._tap.read()
        before, self._view = self._view, view
        if before is None:
            self._send(self._everything())
            return
        for event in news:
            self._tell("decision", to_data(event))
        self._tell("delta", delta_of(before, view))

    async def _read_story(self, controller_started_s: float) -> list[Event]:
        """Events that are new. A controller without a log on disk numbers from 1 again."""
        if controller_started_s != self._controller_s:
            self._controller_s, self._seq = controller_started_s, 0
        known = {(event.seq, event.time_s) for event in self._story}
        news: list[Event] = []
        while True:
            page = await self._source.events(self._seq, PAGE_EVENTS)
            for event in page:
                self._seq = event.seq
                if event.kind in STORY and (event.seq, event.time_s) not in known:
                    news.append(event)
            if len(page) < PAGE_EVENTS:
                break
        self._story.extend(news)
        return news[-MAX_BEHIND // 2 :]

    def _everything(self) -> bytes:
        """All that a page draws."""
        assert self._view is not None
        return self._encode("snapshot", self._view | {"story": [to_data(event) for event in self._story]})

    def _missed(self, last_id: str) -> list[bytes] | None:
        """What came after a message of this feed; None where that is not known any more."""
        feed, _, text = last_id.partition("-")
        if feed != self._name or not text.isascii() or not text.isdecimal() or len(text) > MAX_DIGITS:
            return None
        missed = [message.encoded for message in self._kept if message.number > int(text)]
        return missed if len(missed) == self._number - int(text) else None

    def _tell(self, kind: str, data: Any) -> None:
        self._number += 1
        encoded = self._encode(kind, data)
        self._kept.append(_Message(self._number, encoded))
        self._send(encoded)

    def _send(self, message: bytes) -> None:
        for watcher in tuple(self._watchers):
            watcher.push(message)

    def _encode(self, kind: str, data: Any) -> bytes:
        text = json.dumps(data, separators=(",", ":"))
        return format_sse_event(data_str=text, event=kind, id=f"{self._name}-{self._number}")
