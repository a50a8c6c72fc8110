"""Links: one to each instance, requests to routes alone, and MOVED frames in their place among the batches."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from pengserve.cluster.ingress.routing.links import LinkPool
from pengserve.planners.types.ids import Epoch, InstanceId, InstanceKey, Version
from pengserve.planners.types.snapshot import STEP_GRACE_S, Address, InstanceStats, Route, RoutingTable
from pengserve.replicas.channel.frames import FrameKind, encode
from pengserve.replicas.channel.server import credentials
from pengserve.replicas.engine import link
from pengserve.replicas.engine.vllm_seam import EngineCoreOutputs
from pengserve.replicas.engine.wire import Codec, Moved, Welcome
from tests.support.handshakes import let_in
from tests.support.moving import CAPACITY

TOKEN = "a-token"


def v(counter: int) -> Version:
    """Of the first controller."""
    return Version(term=1, counter=counter)


class Listener:
    """Shakes hands, then sends what a test gives it."""

    def __init__(self, instance_id: int) -> None:
        self.key = InstanceKey(instance_id=InstanceId(instance_id), incarnation=0)
        self.writers: list[asyncio.StreamWriter] = []
        self.stats = InstanceStats()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await let_in(reader, writer, credentials(TOKEN, ""))
        writer.writelines(encode(FrameKind.WELCOME, [msgspec.msgpack.encode(Welcome(self.key, CAPACITY, self.stats))]))
        self.writers.append(writer)

    def batch(self, step: int) -> None:
        codec = Codec()
        parts = [codec.encode_stats(InstanceStats(step=step)), *codec.encode_outputs(EngineCoreOutputs())]
        self.writers[-1].writelines(encode(FrameKind.BATCH, parts))

    def heartbeat(self, step_age_s: float) -> None:
        """As an instance sends it whose channel is well and whose step has lasted for so long."""
        codec = Codec()
        stats = InstanceStats(step_age_s=step_age_s, step_limit_s=90.0)
        parts = [codec.encode_stats(stats), *codec.encode_outputs(EngineCoreOutputs())]
        self.stats = stats
        self.writers[-1].writelines(encode(FrameKind.BATCH, parts))

    def moved(self, part: bytes) -> None:
        self.writers[-1].writelines(encode(FrameKind.MOVED, [part]))


class Handler:
    """Notes what links say."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def on_up(self, link: Any) -> None:
        self.said.append("up")

    async def on_batch(self, link: Any, batch: Any) -> None:
        self.said.append(batch.stats.step)

    def on_moved(self, link: Any, moved: Moved) -> None:
        self.said.append(moved)

    def on_down(self, link: Any, *, lost: bool) -> None:
        self.said.append("lost" if lost else "closed")

    def is_busy(self, link: Any) -> bool:
        return False


@asynccontextmanager
async def listening(listener: Listener) -> AsyncIterator[str]:
    server = await asyncio.start_server(listener.serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in listener.writers:
            writer.close()


@asynccontextmanager
async def pooling() -> AsyncIterator[tuple[LinkPool, Handler]]:
    handler = Handler()

    async def report_lost(key: InstanceKey, why: str) -> None:
        pass

    pool = LinkPool(handler, token=TOKEN, client_id="tests", report_lost=report_lost)
    try:
        yield pool, handler
    finally:
        await pool.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(40):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def route(listener: Listener, endpoint: str) -> Route:
    return Route(key=listener.key, endpoint=endpoint, members=(listener.key.instance_id,), shape="dp")


async def test_every_address_has_a_link_and_routes_alone_take_requests() -> None:
    leader, follower = Listener(0), Listener(1)
    async with listening(leader) as first, listening(follower) as second, pooling() as (pool, _):
        addresses = (Address(key=leader.key, endpoint=first), Address(key=follower.key, endpoint=second))
        pool.apply(RoutingTable(version=v(1), epoch=Epoch(0), routes=(route(leader, first),), addresses=addresses))
        await until(lambda: pool.find(leader.key) and pool.find(follower.key))
        assert [link.key for link in pool.ready()] == [leader.key]
        both = (route(leader, first), route(follower, second))
        pool.apply(RoutingTable(version=v(2), epoch=Epoch(1), routes=both, addresses=addresses))
        assert len(pool.ready()) == 2, "at once: the link is there"
        assert len(follower.writers) == 1


async def test_a_table_without_addresses_is_followed_by_its_routes() -> None:
    listener = Listener(0)
    async with listening(listener) as endpoint, pooling() as (pool, _):
        pool.apply(RoutingTable(version=v(1), epoch=Epoch(0), routes=(route(listener, endpoint),)))
        await until(pool.ready)


async def test_moved_frames_come_in_order_with_batches() -> None:
    listener = Listener(0)
    moved = Moved(["a", "b"], InstanceKey(instance_id=InstanceId(1), incarnation=2), True)
    left = Moved(["c"], None, False)
    async with listening(listener) as endpoint, pooling() as (pool, handler):
        pool.apply(RoutingTable(version=v(1), epoch=Epoch(0), routes=(route(listener, endpoint),)))
        await until(pool.ready)
        listener.batch(1)
        listener.moved(msgspec.msgpack.encode(moved))
        listener.batch(2)
        listener.moved(msgspec.msgpack.encode(left))
        await until(lambda: len(handler.said) == 5)
        assert handler.said == ["up", 1, moved, 2, left]


async def test_a_malformed_moved_ends_the_link() -> None:
    listener = Listener(0)
    async with listening(listener) as endpoint, pooling() as (pool, handler):
        pool.apply(RoutingTable(version=v(1), epoch=Epoch(0), routes=(route(listener, endpoint),)))
        await until(pool.ready)
        listener.moved(b"\xc1")
        await until(lambda: "lost" in handler.said)


@pytest.mark.parametrize("name", ["on_up", "on_batch", "on_moved", "on_down"])
async def test_a_fault_in_a_callback_costs_the_link_and_never_the_instance(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener(0)
    async with listening(listener) as endpoint, pooling() as (pool, handler):
        callback, has_failed = getattr(handler, name), asyncio.Event()

        def fail_once(*args: Any, **named: Any) -> Any:
            if has_failed.is_set():
                return callback(*args, **named)
            has_failed.set()
            raise ValueError("a fault of ours")

        monkeypatch.setattr(handler, name, fail_once)
        pool.apply(RoutingTable(version=v(1), epoch=Epoch(0), routes=(route(listener, endpoint),)))
        await until(lambda: listener.writers)
        listener.batch(1)
        listener.moved(msgspec.msgpack.encode(Moved(["a"], None, False)))
        if name == "on_down":
            await until(lambda: len(handler.said) == 3)
            listener.writers[-1].close()
        await until(lambda: has_failed.is_set() and len(listener.writers) == 2 and pool.ready())
        listener.batch(7)
        await until(lambda: 7 in handler.said)
        assert "lost" in handler.said, "its requests are resumed"
        assert "connecting again" in caplog.text


async def test_a_loop_that_stood_still_takes_no_instance_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HEARTBEAT_S", 0.02)
    listener = Listener(0)
    async with listening(listener) as endpoint, pooling() as (pool, handler):
        pool.apply(RoutingTable(version=v(1), epoch=Epoch(0), routes=(route(listener, endpoint),)))
        await until(pool.ready)
        for step in range(1, 4):
            listener.batch(step)
            time.sleep(2 * link.SILENT_BEATS * link.HEARTBEAT_S)  # noqa: ASYNC251  what a costly request would do
            await until(lambda step=step: step in handler.said)
        assert "lost" not in handler.said


async def test_an_instance_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HEARTBEAT_S", 0.01)
    listener = Listener(0)
    async with listening(listener) as endpoint, pooling() as (pool, handler):
        pool.apply(RoutingTable(version=v(1), epoch=Epoch(0), routes=(route(listener, endpoint),)))
        await until(lambda: "lost" in handler.said)
        await until(lambda: len(listener.writers) > 1)


async def test_an_instance_whose_step_hangs_is_given_up_though_its_heartbeats_come() -> None:
    listener = Listener(0)
    async with listening(listener) as endpoint, pooling() as (pool, handler):
        pool.apply(RoutingTable(version=v(1), epoch=Epoch(0), routes=(route(listener, endpoint),)))
        await until(pool.ready)
        for step_age_s in (5.0, 60.0, 90.0 + STEP_GRACE_S):
            listener.heartbeat(step_age_s)
        await until(lambda: len(handler.said) == 4)
        assert "lost" not in handler.said, "as long as its own watch may still act"
        listener.heartbeat(91.0 + STEP_GRACE_S)
        await until(lambda: "lost" in handler.said)
        await until(lambda: len(listener.writers) > 2)
        assert handler.said.count("up") == 1 and not pool.ready(), "it gets no request until the step has ended"
        listener.stats = InstanceStats()
        await until(lambda: handler.said.count("up") == 2)
