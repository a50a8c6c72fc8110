"""What members say to each other during a switch: one struct a word, with the fields of that word.

    leader                            follower
    Drain  ------------------------>           (sequential, soft) let running requests end
           <------------------------  Drained
    Return ------------------------>           (restore) let weights come back beside the steps
    Meet   ------------------------>           stop at a step boundary (in a part that is a group, its leader tells
                                               the others of the part, after its last step)
           <------------------------  *Met     stopped; what this member brings
    *Wave, ------------------------>           one round of the move (zero or more): KV of these requests moves; before
    Gather,                                    a restore's it stands still, where there is a host tier, and those that
    Place                                      lead the parts give the requests blocks there
           <------------------------  *Done,   what has become of the round here
                                      Gathered,
                                      Placed
    Commit ------------------------>           the new shape holds from the next step on

Either side may say Cancel instead, with a reason. Before the first round that leaves everything as it was.
"""

from typing import TypeVar

import msgspec

from pengserve.planners.types.plans import SwitchPlan
from pengserve.replicas.engine.groups.peer_codec import Cancel, PeerCodec, PeerWord
from pengserve.replicas.engine.movers.reshard import Traveller


class Drain(PeerWord):
    """Let what runs end, and say when it has."""

    plan: SwitchPlan


class Drained(PeerWord):
    """What ran has ended."""


class Return(PeerWord):
    """Let the weights come back that the plan's parts need."""

    plan: SwitchPlan
    withheld: list[int]  # logical blocks whose memory becomes room for them


class Meet(PeerWord):
    """Stop at the next step boundary."""

    plan: SwitchPlan


class Commit(PeerWord):
    """The new shape holds from the next step on."""


class MergeMet(PeerWord):
    """A member stands still, and brings these requests."""

    num_free: int  # blocks of `dp`
    num_lendable: int  # blocks of `dp` that no paused request keeps
    num_paused: int  # requests that stay in `dp`, paused
    travellers: list[Traveller]
    device_blocks: int  # that its device holds in all layers, where there is a host tier; else 0
    leased: list[int]  # all blocks of the lane of the narrower group that this member leads


class MergeWave(PeerWord):
    """These requests move into the group's lane."""

    travellers: list[Traveller]
    lease: list[int]  # logical blocks that join the lane with it
    given_up: list[str]  # requests for whose KV there is no room: they go on from their tokens
    freed: list[list[int]]  # of each part, blocks of its lane that nothing needs once these requests have left


class MergeDone(PeerWord):
    """A wave has moved."""

    num_free: int  # blocks of `dp`


class SplitMet(PeerWord):
    """A member stands still."""

    num_free: int  # blocks of `dp`


class SplitWave(PeerWord):
    """These requests leave the group's lane."""

    travellers: list[Traveller]
    release: list[int]  # logical blocks that leave the lane before it


class SplitDone(PeerWord):
    """A wave has moved."""

    num_free: int  # blocks of `dp`
    refused: list[str]  # requests that were to come here and found no room


class DropMet(PeerWord):
    """A member stands still, and brings these requests."""

    travellers: list[Traveller]
    host_rows: int  # of its host tier; 0: it has none


class DropWave(PeerWord):
    """Memory of weights becomes room for KV, and these requests go to the leader."""

    travellers: list[Traveller]
    order: list[int]  # the lane's other logical blocks, in the order in which they get memory


class DropDone(PeerWord):
    """Memory has changed hands."""

    num_backed: int  # blocks of `order` that have room here
    num_columns: int  # blocks of the device that nothing has


class RestoreMet(PeerWord):
    """A member stands still."""

    host_rows: int  # of its host tier; 0: it has none


class Gather(PeerWord):
    """Let the KV of these requests stand still, and let go of all other."""

    blocks: list[int]  # the lane's


class Gathered(PeerWord):
    """It stands still."""

    num_free: int  # rows of the host tier


class Place(PeerWord):
    """Give these requests blocks where they go on."""

    travellers: list[Traveller]
    host_rows: list[int]  # of each member's host tier, in rank order


class Placed(PeerWord):
    """These have blocks, in parts that this member leads."""

    travellers: list[Traveller]


class RestoreWave(PeerWord):
    """The KV of these requests goes to their parts."""

    travellers: list[Traveller]


class RestoreDone(PeerWord):
    """It is there."""


Met = MergeMet | SplitMet | DropMet | RestoreMet
Round = MergeWave | SplitWave | DropWave | Gather | Place | RestoreWave
Answer = MergeDone | SplitDone | DropDone | Gathered | Placed | RestoreDone
Word = Drain | Drained | Return | Meet | Met | Round | Answer | Commit | Cancel
SomeWord = TypeVar("SomeWord", bound=PeerWord)


class SwitchMessage(msgspec.Struct, array_like=True):
    """A word about one plan."""

    plan_id: str
    word: Word


class SwitchCodec(PeerCodec[SwitchMessage]):
    """Encoder and decoder; any thread may use its own."""

    def __init__(self) -> None:
        super().__init__(SwitchMessage, "a switch")
