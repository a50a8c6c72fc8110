"""Laws: reading inverts encoding for any parts in any pieces; what is no frame is refused, never misread."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pengserve.planners.types.errors import LinkLostError
from pengserve.replicas.channel.frames import Frame, FrameKind, encode, read


async def parse(data: bytes, piece: int = 1 << 20) -> Frame:
    reader = asyncio.StreamReader()
    for start in range(0, len(data), piece):
        reader.feed_data(data[start : start + piece])
    reader.feed_eof()
    return await read(reader, 1 << 16)


@given(st.sampled_from(FrameKind), st.lists(st.binary(max_size=300), max_size=9), st.integers(1, 50))
def test_read_inverts_encode(kind: FrameKind, parts: list[bytes], piece: int) -> None:
    frame = asyncio.run(parse(b"".join(encode(kind, parts)), piece))
    assert (frame.kind, [bytes(part) for part in frame.parts]) == (kind, parts)


@given(st.binary(max_size=200))
def test_noise_is_refused_or_is_a_frame(noise: bytes) -> None:
    try:
        frame = asyncio.run(parse(noise))
    except LinkLostError:
        return
    encoded = b"".join(bytes(b) for b in encode(frame.kind, frame.parts))
    assert noise.startswith(encoded)


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4), st.data())
def test_truncated_frame_is_refused(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(encode(FrameKind.BATCH, parts))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(LinkLostError):
        asyncio.run(parse(whole[:cut]))


async def test_oversized_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(LinkLostError, match="outside"):
        await parse((1 << 20).to_bytes(4, "little") + b"\x06")
