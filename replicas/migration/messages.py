"""What instances say to each other about one migration: one struct a word, with the fields of that word.

Source and target are groups, of one member where an instance serves alone. Their leaders speak:

    source's leader           target's leader
    Offer   ---------------------->            is there room for this request?
            <----------------------   Ready    yes: its blocks are reserved; so many tiles are in the prefix cache
    Copy    ---------------------->            these tiles follow, in pieces, beside the steps of both
    ...                                        again, for what the request has filled meanwhile
    Copy    ---------------------->            the rest, at a step boundary: the request stands still from here on
    Tail    ---------------------->            all its tokens, and how many of them have KV
            <----------------------   Taken    it goes on at the target

Either side may say Cancel, with a reason, until the target has said Taken. The request is where it was then.

Each leader tells the other members of its group what they send, or get:

    leader                    member
    Send    ---------------------->            (source) send your share of these tiles
            <----------------------   Sent     it has left
    Expect  ---------------------->            (target) your share of these tiles comes, and goes there
            <----------------------   Written  it is written
    Over    ---------------------->            (both) the migration has ended
            <----------------------   Failed   (both) this member cannot go on with it

A tile has the tokens of a block of `dp` (`engine/lanes/kv_shares.py`).
"""

import msgspec

from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.groups.peer_codec import Cancel, PeerCodec, PeerWord
from pengserve.replicas.engine.lanes.handoff import Handoff


class Side(msgspec.Struct, array_like=True, frozen=True):
    """A group that takes part: its shape ("dp", "tp2", ...) and its members in rank order. The first leads."""

    shape: str
    members: tuple[InstanceKey, ...]

    @property
    def leader(self) -> InstanceKey:
        """The member that schedules."""
        return self.members[0]


class Offer(PeerWord):
    """A request comes."""

    handoff: Handoff
    num_tokens: int  # to reserve room for
    source: Side


class Ready(PeerWord):
    """Its blocks are reserved."""

    num_tiles: int  # of the request's first ones, which are here already
    target: Side


class Copy(PeerWord):
    """Tiles `[first, first + count)` of the request, in the order of its tokens, follow in pieces."""

    number: int  # of the copies of this request, from 0
    first: int
    count: int


class Tail(PeerWord):
    """All KV has been sent: the target goes on with the request."""

    output_token_ids: list[int]  # all of them
    num_computed_tokens: int


class Taken(PeerWord):
    """The request goes on at the target."""


class Send(PeerWord):
    """Member of the source: send your share of this copy."""

    copy: Copy
    blocks: list[int]  # logical blocks of the lane that hold these tiles
    target: Side
    is_last: bool  # the request stands still: send all of it now


class Expect(PeerWord):
    """Member of the target: your share of this copy comes."""

    copy: Copy
    blocks: list[int]  # logical blocks of the lane that get these tiles
    source: Side
    lease: list[int]  # blocks that join the lane before


class Over(PeerWord):
    """The migration has ended for this member, however it has ended."""

    lease: list[int]  # blocks that have joined the lane


class Sent(PeerWord):
    """This member's share of a copy has left."""

    number: int


class Written(PeerWord):
    """This member's share of a copy is written."""

    number: int


class Failed(PeerWord):
    """This member cannot go on."""

    why: str


Word = Offer | Ready | Copy | Tail | Taken | Cancel | Send | Expect | Over | Sent | Written | Failed

Name = tuple[InstanceKey, int]
"""Of a migration: the source's leader, and its number there."""


class MigrationMessage(msgspec.Struct, array_like=True):
    """A word about one migration."""

    name: Name
    word: Word


class MigrationCodec(PeerCodec[MigrationMessage]):
    """Encoder and decoder; any thread may use its own."""

    def __init__(self) -> None:
        super().__init__(MigrationMessage, "a migration")
