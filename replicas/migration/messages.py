"""What the two instances of one migration say to each other: one struct a word, as in a switch.

    source                            target
    Offer   ---------------------->            a request comes: is there room?
            <----------------------   Ready    its blocks are reserved
    Copy    ---------------------->            these blocks follow, in pieces, beside the steps of both
    ...                                        again, for what the request has filled meanwhile
    Copy    ---------------------->            the rest, at a step boundary: the request stands still from here on
    Tail    ---------------------->            all its tokens, and how many of them have KV
            <----------------------   Taken    it goes on at the target

Either side may say Cancel, with a reason, until the target has said Taken. The request is where it was then.
"""

import msgspec

from pengserve.replicas.engine.handoff import Handoff
from pengserve.replicas.engine.peer_codec import PeerCodec


class _Word(msgspec.Struct, kw_only=True, tag=True, tag_field="word"):
    """A word of the conversation."""


class Offer(_Word):
    """A request comes."""

    handoff: Handoff
    num_tokens: int  # to reserve room for


class Ready(_Word):
    """Its blocks are reserved."""


class Copy(_Word):
    """Blocks `[first, first + count)` of the request, in the order of its tokens, follow in pieces."""

    first: int
    count: int


class Tail(_Word):
    """All KV has been sent: the target goes on with the request."""

    output_token_ids: list[int]  # all of them
    num_computed_tokens: int


class Taken(_Word):
    """The request goes on at the target."""


class Cancel(_Word):
    """The migration is over. The request stays at the source."""

    why: str


Word = Offer | Ready | Copy | Tail | Taken | Cancel


class MigrationMessage(msgspec.Struct, array_like=True):
    """A word about one migration; the source numbers those that it begins."""

    number: int
    from_source: bool
    word: Word


class MigrationCodec(PeerCodec[MigrationMessage]):
    """Encoder and decoder; any thread may use its own."""

    def __init__(self) -> None:
        super().__init__(MigrationMessage, "a migration")
