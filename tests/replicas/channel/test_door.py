"""Laws of the door: strangers cost little, and keep out no process that knows the token."""

import asyncio
import errno
import logging
import os
import resource
import socket
import struct
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pengserve.planners.types.errors import LinkLostError
from pengserve.replicas.channel import door as door_module
from pengserve.replicas.channel import handshake
from pengserve.replicas.channel.door import Door, Entrant
from pengserve.replicas.channel.handshake import MAX_HANDSHAKE_BYTES, Credentials

OWN = Credentials(protocol="test channel", version=3, token="a-secret-token")
TIMEOUT_S = 20.0


class House:
    """A door that lets in and notes the claims of those that came."""

    def __init__(self, timeout_s: float) -> None:
        self.claims: list[bytes] = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = self.listener.getsockname()
        self.door = Door(self.listener, OWN, self.admit, timeout_s)

    async def admit(self, entrant: Entrant) -> None:
        await asyncio.get_running_loop().sock_sendall(entrant.sock, entrant.accepted)
        self.claims.append(entrant.claim)
        entrant.sock.close()

    async def connect(self, claim: bytes) -> None:
        """An honest process; LinkLostError where it is kept out."""
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await handshake.connect(reader, writer, OWN, claim)
        finally:
            writer.close()

    async def ended(self, sock: socket.socket) -> float:
        """Waits until the door has closed `sock`; the seconds that took."""
        started_s, loop = time.monotonic(), asyncio.get_running_loop()
        with suppress(ConnectionError):
            async with asyncio.timeout(TIMEOUT_S):
                while await loop.sock_recv(sock, 4096):
                    continue
        return time.monotonic() - started_s

    async def stranger(self) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        return sock


@asynccontextmanager
async def open_house(timeout_s: float = TIMEOUT_S) -> AsyncIterator[House]:
    house = House(timeout_s)
    task = asyncio.create_task(house.door.run())
    try:
        yield house
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await house.door.close()
        house.listener.close()


async def test_silent_strangers_are_bounded_in_number_and_keep_out_no_honest_process() -> None:
    async with open_house() as house:
        strangers = [await house.stranger() for _ in range(200)]
        await house.connect(b"honest")
        assert house.claims == [b"honest"]
        assert house.door.num_waiting <= door_module.MAX_WAITING_PER_SOURCE
        assert house.door.num_strangers >= 200 - door_module.MAX_WAITING_PER_SOURCE
        for stranger in strangers:
            stranger.close()


async def test_sources_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MAX_WAITING", 8)
    async with open_house() as house:
        strangers = []
        for i in range(20):
            sock = socket.socket()
            sock.bind((f"127.0.1.{i + 1}", 0))
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, house.address)
            strangers.append(sock)
        await house.connect(b"honest")
        assert house.claims == [b"honest"] and house.door.num_waiting <= 8
        for stranger in strangers:
            stranger.close()


async def test_a_stranger_that_sends_a_byte_now_and_then_has_one_deadline_for_all() -> None:
    async with open_house(timeout_s=0.3) as house:
        sock = await house.stranger()

        async def trickle() -> None:
            loop = asyncio.get_running_loop()
            with suppress(ConnectionError):
                for byte in struct.pack("<I", 4000) + bytes(4000):
                    await loop.sock_sendall(sock, bytes([byte]))
                    await asyncio.sleep(0.05)

        task = asyncio.create_task(trickle())
        assert await house.ended(sock) < 0.3 + 8.0
        task.cancel()
        sock.close()


async def test_silent_strangers_leave_no_traceback_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with open_house(timeout_s=0.05) as house:
        strangers = [await house.stranger() for _ in range(10)]
        for stranger in strangers:
            await house.ended(stranger)
            stranger.close()
        assert house.door.num_strangers == 10
    assert not [record for record in caplog.records if record.exc_info]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


async def test_a_port_check_is_no_stranger() -> None:
    async with open_house() as house:
        (await house.stranger()).close()
        await house.connect(b"honest")
        assert house.door.num_strangers == 0


async def test_a_process_without_file_descriptors_accepts_again_once_there_are_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with open_house() as house:
        visitor = socket.socket()
        visitor.setblocking(False)
        await asyncio.sleep(0)
        try:
            os.close(lowest_free := os.dup(visitor.fileno()))
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))  # not one more than there are
            await asyncio.get_running_loop().sock_connect(visitor, house.address)
            async with asyncio.timeout(TIMEOUT_S):
                while "cannot be accepted for now" not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        await house.connect(b"honest")
        assert house.claims == [b"honest"]
        assert caplog.text.count("cannot be accepted for now") == 1, "it is said once"
        assert "accepted again" in caplog.text
        visitor.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no memory"), RuntimeError("can't start new thread")])
async def test_no_error_of_the_system_ends_the_accepting(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    async with open_house() as house:
        begin, left = house.door._begin, [error] * 3

        def failing(sock: socket.socket, source: str) -> None:
            if left:
                sock.close()
                raise left.pop()
            begin(sock, source)

        monkeypatch.setattr(house.door, "_begin", failing)
        for _ in range(3):
            with pytest.raises((LinkLostError, ConnectionError)):
                await house.connect(b"too early")
        await house.connect(b"honest")
        assert house.claims == [b"honest"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(noise=st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(lambda b: struct.pack("<I", len(b)) + b)))
def test_noise_is_closed_in_time_and_harms_no_honest_process(noise: bytes) -> None:
    async def scene() -> None:
        async with open_house(timeout_s=0.02) as house:
            sock = await house.stranger()
            await asyncio.get_running_loop().sock_sendall(sock, noise)
            assert await house.ended(sock) < 8.0
            sock.close()
            house.door._timeout_s = TIMEOUT_S
            await house.connect(b"honest")
            assert house.claims == [b"honest"]

    asyncio.run(scene())


async def test_a_length_that_lies_costs_no_memory() -> None:
    async with open_house() as house:
        tracemalloc.start()
        try:
            for size in (0xFFFFFFFF, 1 << 30, MAX_HANDSHAKE_BYTES + 1, 0):
                sock = await house.stranger()
                await asyncio.get_running_loop().sock_sendall(sock, struct.pack("<I", size) + bytes(64))
                await house.ended(sock)
                sock.close()
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 1 << 20
