"""Laws of messages between peers: noise of a peer ends its connection, costs no memory and is never misread."""

import socket
import struct
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.types.errors import LinkLostError
from pengserve.planners.types.ids import InstanceId, InstanceKey
from pengserve.replicas.comm import link as link_module
from pengserve.replicas.comm.link import Link

KEY = InstanceKey(instance_id=InstanceId(1), incarnation=1)
TIMEOUT_S = 30.0


def read(noise: bytes) -> list[tuple[str, list[bytes]]]:
    """The messages that a link delivers of `noise`; raises what ends its reader."""
    pair = socket.create_server(("127.0.0.1", 0))
    try:
        sender = socket.create_connection(pair.getsockname(), TIMEOUT_S)
        receiver, _ = pair.accept()
        link = Link(KEY, receiver, TIMEOUT_S)
        sending = threading.Thread(target=lambda: (sender.sendall(noise), sender.close()))
        sending.start()
        messages: list[tuple[str, list[bytes]]] = []
        try:
            link.read_all(lambda kind, parts: messages.append((kind, [bytes(part) for part in parts])))
        finally:
            sending.join(TIMEOUT_S)
            link.release()
        return messages
    finally:
        pair.close()


def message(kind: str, parts: list[bytes]) -> bytes:
    name = kind.encode()
    body = struct.pack("<BB", len(name), len(parts)) + name
    body += b"".join(struct.pack("<I", len(part)) for part in parts) + b"".join(parts)
    return struct.pack("<I", len(body)) + body


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(lambda b: struct.pack("<I", len(b)) + b)))
def test_noise_is_refused_or_is_whole_messages(noise: bytes) -> None:
    try:
        messages = read(noise)
    except (LinkLostError, ConnectionError):
        return
    assert noise.startswith(b"".join(message(kind, parts) for kind, parts in messages))


@pytest.mark.parametrize("size", [0, 1, link_module.MAX_MESSAGE_BYTES + 1, 0xFFFFFFFF])
def test_a_length_that_lies_costs_no_memory(size: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LinkLostError, match="outside"):
            read(struct.pack("<I", size) + bytes(64))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1 << 20
