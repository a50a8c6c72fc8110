"""The answer to `GET /cluster/stream`: pings, its end, and pages that go without a word."""

import asyncio
from typing import Any

import pytest

from pengserve.cluster.ui import stream as module
from pengserve.cluster.ui.feed import Feed
from pengserve.cluster.ui.stream import FeedResponse
from tests.support.simulated import SimulatedCluster


class Page:
    """An ASGI client: what it got, and whether it still reads."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.has_left, self.may_read = asyncio.Event(), asyncio.Event()
        self.may_read.set()

    async def receive(self) -> Any:
        await self.has_left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.may_read.wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


def answering(feed: Feed, page: Page, is_ending: Any = lambda: False) -> asyncio.Task[None]:
    response = FeedResponse(feed, feed.join(), is_ending)
    return asyncio.create_task(response({"type": "http"}, page.receive, page.send))


async def until(what: Any) -> None:
    async with asyncio.timeout(10):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAKE_S", 0.02)


async def test_a_silent_stream_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PING_S", 0.05)
    feed, page = Feed(SimulatedCluster(1), period_s=1000.0), Page()
    task = answering(feed, page)
    await until(lambda: page.body.count(b": ping\n\n") >= 3)
    page.has_left.set()
    await asyncio.wait_for(task, 5)
    assert feed.num_watchers == 0
    feed.close()


async def test_a_page_that_leaves_is_forgotten_at_once() -> None:
    feed, page = Feed(SimulatedCluster(1), period_s=0.01), Page()
    task = answering(feed, page)
    await until(lambda: b"event: snapshot" in page.body)
    page.has_left.set()
    await asyncio.wait_for(task, 5)
    assert feed.num_watchers == 0 and page.messages[-1].get("more_body") is not False
    feed.close()


async def test_a_page_whose_socket_is_full_is_let_go() -> None:
    feed, page = Feed(SimulatedCluster(1), period_s=0.005), Page()
    task = answering(feed, page)
    await until(lambda: page.body)
    page.may_read.clear()
    await asyncio.wait_for(task, 10)
    assert feed.num_watchers == 0
    feed.close()


async def test_a_stream_ends_after_a_while_and_when_the_ingress_does(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, page, ends = Feed(SimulatedCluster(1), period_s=0.01), Page(), asyncio.Event()
    task = answering(feed, page, ends.is_set)
    await until(lambda: page.body)
    monkeypatch.setattr(module, "DRAINING_AGE_S", 0.05)
    ends.set()
    await asyncio.wait_for(task, 5)
    assert page.messages[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    monkeypatch.setattr(module, "MAX_AGE_S", 0.05)
    await asyncio.wait_for(answering(feed, Page()), 5)
    feed.close()


async def test_a_server_that_cancels_the_request_leaves_nothing_behind() -> None:
    feed, page = Feed(SimulatedCluster(1), period_s=0.01), Page()
    task = answering(feed, page)
    await until(lambda: page.body)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert feed.num_watchers == 0
    feed.close()
