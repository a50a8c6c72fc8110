"""Frames: one kind byte and a few byte strings, with their lengths in front. They follow the handshake.

    | u32 length of all that follows | u8 kind | u8 number of parts n | u32 length of part | x n | part ... |

Lengths are little-endian. Parts are opaque here; `engine.wire` knows what is in them.
"""

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from pengserve.planners.types.errors import LinkLostError

PROTOCOL_VERSION = 4
MAX_FRAME_BYTES = 256 << 20

Buffer = bytes | bytearray | memoryview

_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<IBB")


class FrameKind(IntEnum):
    """What a frame says. ADD, ABORT and REORDER come from the ingress, the others from the instance, WELCOME first."""

    WELCOME = 2
    ADD = 4
    ABORT = 5
    BATCH = 6
    MOVED = 7
    TRIAL = 8
    REORDER = 9
    PAUSED = 10


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame."""

    kind: FrameKind
    parts: list[memoryview]


def encode(kind: FrameKind, parts: Sequence[Buffer]) -> list[Buffer]:
    """The buffers of one frame, ready for `writelines`; parts are not copied."""
    sizes = [memoryview(part).nbytes for part in parts]
    total = 2 + 4 * len(sizes) + sum(sizes)
    head = _HEADER.pack(total, kind, len(sizes)) + b"".join(map(_LENGTH.pack, sizes))
    return [head, *parts]


async def read(reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> Frame:
    """The next frame.

    Raises:
        LinkLostError: the other side closed, or sent what is no frame.
    """
    try:
        (total,) = _LENGTH.unpack(await reader.readexactly(4))
        if not 2 <= total <= max_bytes:
            raise LinkLostError(f"a frame of {total} bytes is outside [2, {max_bytes}]")
        return _parse(memoryview(await reader.readexactly(total)))
    except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, OSError) as error:
        raise LinkLostError("the other side closed the channel") from error


def _parse(body: memoryview) -> Frame:
    try:
        kind, num_parts = FrameKind(body[0]), body[1]
        start = 2 + 4 * num_parts
        parts = []
        for i in range(num_parts):
            (size,) = _LENGTH.unpack_from(body, 2 + 4 * i)
            parts.append(body[start : start + size])
            start += size
    except (ValueError, struct.error, IndexError) as error:
        raise LinkLostError("the other side sent a malformed frame") from error
    if start != len(body):
        raise LinkLostError("the other side sent a frame whose lengths do not add up")
    return Frame(kind, parts)
