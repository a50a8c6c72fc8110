"""How bytes go from one member of a group to another: one protocol with three ends.

PeerChannel            peer messages: a piece at a time, beside steps; those of the others come by themselves
BulkChannel            as PeerChannel, but a message only announces its piece; NCCL or gloo bring it (`comm/bulk.py`)
CommunicatorChannel    the group's communicator (own TCP, gloo or NCCL): whole segments, all members at once
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from pengserve.planners.types.errors import EngineError
from pengserve.replicas.channel.frames import Buffer
from pengserve.replicas.comm.bulk import PIECE_BYTES, BulkWays
from pengserve.replicas.comm.communicator import Communicator, Move
from pengserve.replicas.kv.pacing import MOST_BYTES

SendPiece = Callable[[int, Sequence[Buffer]], None]
"""Sends parts to a rank; returns when they are on their way, and the tensor may be overwritten."""


class Piece(NamedTuple):
    """Some rows of one segment, on their way to or from the member of rank `peer`."""

    peer: int
    layer: int  # names the segment between the two members
    first: int  # of its rows
    form: int  # the order of the bytes; see `Rows.form`
    data: torch.Tensor  # uint8, one-dimensional


class Header(NamedTuple):
    """What a peer message says of the piece in it."""

    layer: int
    first: int
    form: int


class Channel(Protocol):
    """One member's end."""

    most_bytes: int  # of one piece that goes beside steps

    def move(self, outgoing: Sequence[Piece], incoming: Sequence[Piece]) -> None:
        """Sends `outgoing`, and fills the tensors of `incoming`, which the others send in this call of theirs.

        Raises:
            EngineError: a member is gone.
        """


class PeerChannel:
    """Peer messages over TCP. What comes from the others is given to `Transfer.receive` when it is here."""

    most_bytes = MOST_BYTES

    def __init__(self, send: SendPiece) -> None:
        self._send = send

    def move(self, outgoing: Sequence[Piece], incoming: Sequence[Piece] = ()) -> None:
        assert not incoming, "messages come by themselves"
        for piece in outgoing:
            self._send(piece.peer, [_header_of(piece), memoryview(piece.data.cpu().numpy())])


class BulkChannel:
    """A peer message announces a piece, and the group's ways bring it, from device to device."""

    most_bytes = PIECE_BYTES

    def __init__(self, ways: BulkWays, announce: SendPiece, send: SendPiece) -> None:
        """
        Args:
            announce: sends a header and a number of bytes; the receiver calls `BulkWays.receive`.
            send: as of a `PeerChannel`, for what is no piece of the ways.
        """
        self._ways, self._announce, self._peers = ways, announce, PeerChannel(send)

    def move(self, outgoing: Sequence[Piece], incoming: Sequence[Piece] = ()) -> None:
        assert not incoming, "messages come by themselves"
        for piece in outgoing:
            if piece.data.numel() > PIECE_BYTES:  # a single row
                self._peers.move([piece])
            else:
                parts = [_header_of(piece), b"%d" % piece.data.numel()]
                self._ways.send(piece.peer, piece.data, partial(self._announce, piece.peer, parts))


class CommunicatorChannel:
    """A group's communicator. All members make the same moves at the same time."""

    most_bytes = MOST_BYTES

    def __init__(self, communicator: Communicator, rank: int) -> None:
        self._communicator, self._rank = communicator, rank

    def move(self, outgoing: Sequence[Piece], incoming: Sequence[Piece]) -> None:
        # Between two members they go by layer: a communicator has no names for moves.
        moves = [Move(self._rank, piece.peer, piece.data) for piece in sorted(outgoing, key=_layer)]
        moves += [Move(piece.peer, self._rank, piece.data) for piece in sorted(incoming, key=_layer)]
        if moves:
            self._communicator.exchange(moves)


def read_header(part: Buffer) -> Header:
    """What `PeerChannel` or `BulkChannel` wrote.

    Raises:
        EngineError: it is no header.
    """
    try:
        return Header(*map(int, bytes(part).split()))
    except (TypeError, ValueError):
        raise EngineError("a peer sent a piece with a header that is none; run one version on all instances") from None


def _header_of(piece: Piece) -> bytes:
    return b"%d %d %d" % (piece.layer, piece.first, piece.form)


def _layer(piece: Piece) -> int:
    return piece.layer
